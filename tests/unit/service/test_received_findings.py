"""Findings of another node: only whole rows of jobs that run here are taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import FormatError, UsageError
from probing.api.tables import table_named
from probing.daemon.service.received_findings import take_findings

NAMES = ("job", "run", "finding_id", "verdict", "severity", "sentence", "found_by")
TEXTS = (*NAMES, "ranks", "nodes", "victims", "about")
LISTS = ("culprits", "evidence", "missing", "refuted_by", "next_steps", "stacks")
ROW: dict[str, Any] = {
    **dict.fromkeys(TEXTS, "x"),
    **dict.fromkeys(LISTS, "[]"),
    "job": "j",
    "run": "r",
    "state": "open",
    "confidence": 0.9,
    "since": None,
    "opened": 7,
    "closed": None,
}


class Watch:
    def __init__(self) -> None:
        self.taken: list[Mapping[str, Any]] = []

    def watches(self, job: str, run: str) -> bool:
        return (job, run) == ("j", "r")

    def take(self, row: Mapping[str, Any]) -> None:
        self.taken.append(row)


def test_rows_of_known_jobs_are_taken() -> None:
    watch = Watch()
    assert take_findings(watch, json.dumps([ROW, {**ROW, "job": "other"}]).encode()) == 1
    assert watch.taken == [ROW]


@pytest.mark.parametrize(
    "change",
    [
        {"node": "n1"},
        {"ts": 7},
        {"more": 1},
        {"job": None},
        {"state": "perhaps"},
        {"opened": None},
        {"opened": "x"},
        {"opened": 1 << 63},
        {"confidence": "high"},
        {"stacks": "{}"},
        {"stacks": "["},
        {"stacks": None},
        {"stacks": "[" * 100_000},
        {"sentence": 7},
        {"job": "x" * 5000},
    ],
)
def test_what_is_no_row_is_refused(change: Mapping[str, Any]) -> None:
    watch = Watch()
    with pytest.raises(UsageError):
        take_findings(watch, json.dumps([{**ROW, **change}]).encode())
    assert watch.taken == []


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[NaN" * 9])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        take_findings(Watch(), text)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(UsageError):
        take_findings(Watch(), json.dumps([ROW] * 17).encode())


COLUMNS = [name for name in table_named("diagnosis.findings").physical.names if name not in ("node", "ts")]
VALUES = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.none()) | st.booleans()


@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES)))
def test_any_rows_are_taken_or_refused(changes: list[dict[str, Any]]) -> None:
    watch = Watch()
    try:
        take_findings(watch, json.dumps([{**ROW, **change} for change in changes]).encode())
    except (UsageError, FormatError):
        assert watch.taken == []
    assert all(isinstance(row["job"], str) and row["state"] in ("open", "closed") for row in watch.taken)
