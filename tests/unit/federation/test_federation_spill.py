"""Answers that do not fit into the memory of the merge."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from probing.federation.planning.catalog import open_database

_ROWS = "CREATE OR REPLACE TABLE t AS SELECT hash(i)::VARCHAR || hash(i + 1)::VARCHAR AS b FROM range(400000) r(i)"
_JOIN = "SELECT count(*) FROM t a JOIN t b USING (b)"


def test_rows_are_spilled_into_the_given_directory_up_to_its_limit(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    with open_database(memory_limit="32MiB", threads=1, spill=str(spill), spill_limit="512MiB") as db:
        db.execute(_ROWS)
        assert db.execute(_JOIN).fetchone() == (400_000,)
        assert list(spill.iterdir())
    small = open_database(memory_limit="32MiB", threads=1, spill=str(spill), spill_limit="1MiB")
    with small as db, pytest.raises(duckdb.OutOfMemoryException):
        db.execute(_ROWS), db.execute(_JOIN)


def test_nothing_is_spilled_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_database(memory_limit="32MiB", threads=1) as db, pytest.raises(duckdb.OutOfMemoryException):
        db.execute(_ROWS), db.execute(_JOIN)
    assert list(tmp_path.iterdir()) == []
