"""Snapshots: the segments and log parts that a query reads, as JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from probing.daemon.store.log.parts import Part
from probing.daemon.store.manifest import Segment

__all__ = ("SnapshotPart", "SnapshotSegment", "StoreSnapshot", "make_snapshot", "snapshot_segment")


class SnapshotSegment(TypedDict):
    """A sealed segment: absolute path, CRC32 of the file, times in UTC ns, and ``jobs`` as in the manifest."""

    path: str
    size: int
    crc: int
    rows: int
    ts_min: int
    ts_max: int
    jobs: list[str] | None


class SnapshotPart(TypedDict):
    """A log part, whose first ``length`` bytes are read. ``tables``: the number of rows by table."""

    path: str
    length: int
    number: int
    tables: dict[str, int]


class StoreSnapshot(TypedDict):
    """Segments by table in the order of their times, and log parts in the order of their numbers.

    The files stay until ``generation`` is released.
    """

    generation: int
    node: str
    root: str
    tables: dict[str, list[SnapshotSegment]]
    parts: list[SnapshotPart]


def make_snapshot(
    generation: int, node: str, root: Path, segments: Iterable[Segment], parts: Iterable[Part]
) -> StoreSnapshot:
    """Returns the snapshot that lists ``segments`` and ``parts``."""
    tables: dict[str, list[SnapshotSegment]] = {}
    for segment in sorted(segments, key=lambda s: (s.ts_min, s.path)):
        tables.setdefault(segment.table, []).append(snapshot_segment(root, segment))
    return {
        "generation": generation,
        "node": node,
        "root": str(root),
        "tables": tables,
        "parts": [{"path": str(p.path), "length": p.length, "number": p.number, "tables": dict(p.rows)} for p in parts],
    }


def snapshot_segment(root: Path, segment: Segment) -> SnapshotSegment:
    """Returns ``segment`` as an entry of a snapshot: path, size, checksum, rows, times and jobs."""
    return {
        "path": str(root / segment.path),
        "size": segment.size,
        "crc": segment.crc,
        "rows": segment.rows,
        "ts_min": segment.ts_min,
        "ts_max": segment.ts_max,
        "jobs": None if segment.jobs is None else list(segment.jobs),
    }
