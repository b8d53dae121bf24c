"""Rows that are held back until all have come."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import pytest

from probing.api.errors import PartialAnswer, QueryMemory
from probing.federation.execution.answer import Rows, held_back

SCHEMA = pa.schema([("x", pa.int64())])


def batches(*, broken: bool = False) -> Generator[pa.RecordBatch, None, None]:
    for first in (0, 3):
        yield pa.record_batch([pa.array(range(first, first + 3))], schema=SCHEMA)
    if broken:
        raise PartialAnswer("1 of 2 nodes did not answer: b (refused)")


def test_all_rows_come() -> None:
    with held_back(Rows(SCHEMA, batches(), ["a: rows were lost"])) as rows:
        assert rows.schema == SCHEMA
        assert [x for batch in rows for x in batch["x"].to_pylist()] == list(range(6))
        assert rows.warnings == ["a: rows were lost"]


def test_no_row_comes_before_an_error() -> None:
    rows = held_back(Rows(SCHEMA, batches(broken=True), []))
    with rows, pytest.raises(PartialAnswer, match=r"b \(refused\)"):
        next(iter(rows))


def test_the_file_is_bounded() -> None:
    with held_back(Rows(SCHEMA, batches(), []), 100) as rows, pytest.raises(QueryMemory, match="--strict holds back"):
        next(iter(rows))


def test_rows_that_nobody_reads_end_the_query() -> None:
    ended: list[bool] = []
    with held_back(Rows(SCHEMA, batches(), [], lambda: ended.append(True))):
        pass
    assert ended == [True]
