"""The status of the store, as JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from probing.daemon.store.manifest import Segment

__all__ = ("StateStatus", "StoreStatus", "TableStatus", "status_by_table")


class TableStatus(TypedDict):
    """The segments of one table. ``ts_min``: their first ``ts``, UTC ns."""

    segments: int
    bytes: int
    rows: int
    ts_min: int


class StateStatus(TypedDict):
    """The status of the open store, as JSON values. ``state``: "running", or "degraded" because of ``reason``.
    ``records`` and the fields after it count since the store was opened.
    """

    state: str
    reason: str
    bytes: int
    segment_bytes: int
    log_bytes: int
    segments: int
    parts: int
    tables: dict[str, TableStatus]
    leases: int
    records: int
    rows: int
    sealed_parts: int
    dropped_segments: int
    dropped_rows: int
    merged_segments: int
    merged_rows: int


class StoreStatus(StateStatus):
    """The status of the store. ``set_aside``: the number of files that were set aside since the store was opened.
    ``torn_records``: the number of records that were found cut short at the start. ``foreign``: the names of files that
    do not belong to the store, which are left alone.
    """

    set_aside: int
    torn_records: int
    foreign: list[str]


def status_by_table(segments: Iterable[Segment]) -> dict[str, TableStatus]:
    """Returns the status of each table that has ``segments``."""
    tables: dict[str, TableStatus] = {}
    for s in segments:
        table = tables.setdefault(s.table, {"segments": 0, "bytes": 0, "rows": 0, "ts_min": s.ts_min})
        table["segments"] += 1
        table["bytes"] += s.size
        table["rows"] += s.rows
        table["ts_min"] = min(table["ts_min"], s.ts_min)
    return tables
