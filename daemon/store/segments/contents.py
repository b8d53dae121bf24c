"""Finds the date, the times and the jobs of rows for the entry of a segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.encoding import column_numbers, sort_rows

__all__ = ("all_jobs", "jobs_of", "split_by_date", "times_of")

_DAY_NS = 86_400_000_000_000
# If the rows have more dates than this, all rows go to the first date: a wrong clock must not make a folder for every
# row.
_MAX_DATES = 8
_MAX_JOBS = 32
_MAX_JOBS_LENGTH = 4096


def split_by_date(rows: pa.Table, sort_by: tuple[str, ...]) -> Iterator[tuple[str, pa.Table]]:
    """Yields the rows of each UTC date of ``ts`` ("2026-11-21"), sorted by ``sort_by``."""
    rows = sort_rows(rows, sort_by)
    days = times_of(rows) // _DAY_NS
    distinct = np.unique(days)
    if len(distinct) > _MAX_DATES:
        days[:] = distinct[0]
        distinct = distinct[:1]
    for day in distinct:
        yield _date(int(day)), rows if len(distinct) == 1 else rows.filter(pa.array(days == day))


def times_of(rows: pa.Table) -> np.ndarray[Any, Any]:
    """Returns the values of ``ts`` in UTC ns; zeros if ``rows`` lack the column."""
    if "ts" not in rows.column_names or not pa.types.is_timestamp(rows.schema.field("ts").type):
        return np.zeros(rows.num_rows, np.int64)
    return np.array(column_numbers(rows.column("ts").cast(pa.timestamp("ns"))), np.int64)


def jobs_of(rows: pa.Table) -> tuple[str, ...] | None:
    """Returns the jobs of ``rows`` in the form of ``Segment.jobs``."""
    if "job" not in rows.column_names:
        return None
    column = rows.column("job").unique()
    if column.null_count or len(column) > _MAX_JOBS:
        return None
    # In a user's table the column ``job`` can have numbers, and the name of a job can have any length.
    jobs = sorted(job for job in column.to_pylist() if isinstance(job, str))
    return tuple(jobs) if len(jobs) == len(column) and sum(map(len, jobs)) <= _MAX_JOBS_LENGTH else None


def all_jobs(segments: Sequence[Segment]) -> tuple[str, ...] | None:
    """Returns the jobs of all ``segments`` together, in the form of ``Segment.jobs``."""
    known = [s.jobs for s in segments if s.jobs is not None]
    jobs = sorted({job for found in known for job in found})
    few = len(jobs) <= _MAX_JOBS and sum(map(len, jobs)) <= _MAX_JOBS_LENGTH
    return tuple(jobs) if len(known) == len(segments) and few else None


def _date(day: int) -> str:
    try:
        return datetime.fromtimestamp(day * 86_400, timezone.utc).strftime("%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return "1970-01-01"
