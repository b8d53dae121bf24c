"""The list of columns that the scene of the end-to-end tests does not fill: its columns and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from filled_columns import ELSEWHERE, METRICS_ELSEWHERE, NEVER, Elsewhere

from probing.api.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
# Every table of rows of processes has these, and helpers of tests make them.
IDENTITY = {"node", "ts", "job", "run", "pid", "start_ns", "rank"}
ENTRIES = [(table, entry) for table, entries in ELSEWHERE.items() for entry in entries]


@pytest.mark.parametrize(("table", "entry"), ENTRIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_column_that_is_filled_elsewhere_is_checked_there(table: str, entry: Elsewhere) -> None:
    columns = {column.name for column in TABLES[table].columns}
    assert set(entry.columns) <= columns
    assert entry.needs
    text = (ROOT / entry.test).read_text()
    if "def test_every_column_is_filled" not in text:
        wanted = (set(entry.columns) or columns) - IDENTITY
        assert {name for name in wanted if not re.search(rf"\b{name}\b", text)} == set()


def test_what_is_never_filled_says_so() -> None:
    for table, names in NEVER.items():
        docs = {column.name: column.doc for column in TABLES[table].columns}
        assert all("NULL:" in docs[name] for name in names), table


def test_a_metric_that_is_shown_elsewhere_is_checked_there() -> None:
    for name, entry in METRICS_ELSEWHERE.items():
        assert entry.needs
        assert name in (ROOT / entry.test).read_text()
