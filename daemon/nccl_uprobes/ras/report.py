"""The common form of RAS reports: rows of ``comm.ras`` as JSON, without node, time, job and process."""

from __future__ import annotations

from typing import TypedDict

__all__ = ("MAX_ROWS", "OPERATION_COUNTS", "RankRow", "Report")

MAX_ROWS = 20_000
OPERATION_COUNTS = {
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
}
"""NCCL's name of an operation -> the column with its count."""
RankRow = dict[str, str | int | bool | None]
"""A row of ``comm.ras``: column -> value."""


class Report(TypedDict):
    """A report of RAS. ``skipped`` counts ranks (in a text report: lines) that were malformed or exceeded MAX_ROWS."""

    rows: list[RankRow]
    skipped: int
