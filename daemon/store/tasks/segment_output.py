"""Yields the bytes of a new segment as the steps of a task."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from probing.daemon.store.segments.contents import jobs_of, times_of
from probing.daemon.store.segments.encoding import ROW_GROUP, SegmentEncoder
from probing.daemon.store.tasks.messages import Data, Made, SegmentBegun, Step

__all__ = ("PIECE_BYTES", "RowSpan", "Source", "data_steps", "end_steps", "segment_steps", "span_of")

# An open file that a task reads from.
Source = io.RawIOBase | io.BufferedReader
# The maximum size of one step, bytes: the collector has one step in memory at a time.
PIECE_BYTES = 1 << 18


class RowSpan(NamedTuple):
    """First and last ``ts`` of some rows, UTC ns, and their ``jobs`` as in the manifest."""

    ts_min: int
    ts_max: int
    jobs: tuple[str, ...] | None


def segment_steps(table: str, date: str, rows: pa.Table) -> Iterator[Step]:
    """Yields the steps of a segment of sorted ``rows`` of one date."""
    yield SegmentBegun(table, date)
    encoder = SegmentEncoder(table)
    for start in range(0, rows.num_rows, ROW_GROUP):
        yield from data_steps(encoder.add(rows.slice(start, ROW_GROUP)))
    yield from end_steps(encoder, span_of(rows))


def end_steps(encoder: SegmentEncoder, span: RowSpan | None = None) -> Iterator[Step]:
    """Yields the footer of a segment, then ``Made``."""
    yield from data_steps(encoder.end())
    times = (span.ts_min, span.ts_max, span.jobs) if span else (None, None, None)
    yield Made(encoder.size, encoder.crc, encoder.rows, *times)


def data_steps(data: memoryview) -> Iterator[Step]:
    """Yields ``data`` in pieces."""
    for start in range(0, len(data), PIECE_BYTES):
        yield Data(data[start : start + PIECE_BYTES])


def span_of(rows: pa.Table) -> RowSpan:
    """Returns the times and jobs of ``rows``, which must not be empty."""
    times = times_of(rows)
    return RowSpan(int(times.min()), int(times.max()), jobs_of(rows))
