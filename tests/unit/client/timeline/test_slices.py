"""The slices of a range: all rows once, of a size that the memory bears, also where nodes lie about their number."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from timeline_scene import BEGIN, JOB, SECOND, Tables, operation

from probing.api.errors import UsageError
from probing.client.timeline import sections
from probing.client.timeline.selection import Selection, slices

_RANGE = Selection(JOB, BEGIN, BEGIN + 3600 * SECOND, {})


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables({})


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.integers(0, 3599), max_size=40),
    st.lists(st.tuples(st.integers(0, 3599), st.integers(1, 40), st.integers(1, 10**6)), max_size=3),
    st.integers(1, 20),
)
def test_each_row_is_in_one_slice(
    tables: Tables, alone: list[int], bursts: list[tuple[int, int, int]], most: int
) -> None:
    calls = [at * SECOND for at in alone] + [at * SECOND + n * gap for at, many, gap in bursts for n in range(many)]
    tables.put("comm.ops", [operation(0, n, call) for n, call in enumerate(calls)])
    cluster: Any = tables
    found = slices(cluster, _RANGE, sections.OPS, most)
    assert all(before.high == after.low for before, after in pairwise(found))
    if found:
        assert found[0].low == _RANGE.begin
        assert found[-1].high == _RANGE.end
    counts = [len(tables.query(_RANGE.select(sections.OPS, low, high)).column("seq")) for low, high, _ in found]
    assert sum(counts) == len(calls)


class _Lying:
    """Answers each count with the same rows."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = list(rows)
        self.asked = 0

    def query(self, _: str) -> pa.Table:
        self.asked += 1
        return pa.Table.from_pylist(self.rows, schema=pa.schema([("bucket", pa.int64()), ("rows", pa.int64())]))


@pytest.mark.parametrize("bucket", [None, -1, 512, 2**62])
def test_buckets_that_cannot_be_are_left_out(bucket: int | None) -> None:
    cluster: Any = _Lying({"bucket": bucket, "rows": 7}, {"bucket": 3, "rows": None})
    assert [one.rows for one in slices(cluster, _RANGE, sections.OPS, 5)] == [0]


def test_more_rows_than_a_trace_can_have_are_refused() -> None:
    cluster: Any = _Lying(*({"bucket": bucket, "rows": 2**40} for bucket in range(512)))
    with pytest.raises(UsageError, match="more than"):
        slices(cluster, _RANGE, sections.OPS, 200_000)
    assert cluster.asked <= 17


def test_rows_that_come_after_the_count_are_in_the_last_slice(tables: Tables) -> None:
    tables.put("comm.ops", [operation(0, n, n * SECOND) for n in range(9)])
    cluster: Any = tables
    found = slices(cluster, _RANGE, sections.OPS, 5)
    tables.put("comm.ops", [operation(0, n, n * SECOND) for n in (*range(9), 3500)])
    seqs = [tables.query(_RANGE.select(sections.OPS, low, high)).column("seq").to_pylist() for low, high, _ in found]
    assert sorted(seq for own in seqs for seq in own) == [*range(9), 3500]
