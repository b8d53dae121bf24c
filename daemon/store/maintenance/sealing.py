"""Log parts into segments: what a sealer does with some closed parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.jobs.runner import Worker
from probing.daemon.store.jobs.steps import Step, pack_tables
from probing.daemon.store.log.parts import Part
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.reader import SegmentFile, is_date_dir, segment_path

__all__ = ("Sealed", "group_parts", "made_segment", "seal_parts")

_MAX_GROUP_BYTES = 16 << 20
_MAX_GROUP_PARTS = 64


@dataclass(slots=True)
class Sealed:
    """``written``: files that may be there."""

    segments: list[Segment] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)


def group_parts(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that are sealed together: small parts, as restarts leave them, become one segment."""
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        if not groups or size + part.raw_bytes > _MAX_GROUP_BYTES or len(groups[-1]) == _MAX_GROUP_PARTS:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.raw_bytes
    return groups


def seal_parts(
    worker: Worker,
    files: Files,
    root: Path,
    parts: Sequence[Part],
    now_ns: int,
    known: Mapping[str, Table],
    sealed: Sealed,
) -> None:
    """Write the rows of ``parts`` as segments into ``sealed``. They count from when the manifest names them; until
    then, and after an error, they are only ``written`` files.

    Raises OSError, WorkerFailed, or FormatError when a segment cannot be written right.
    """
    there = []
    for part in parts:
        try:
            files.size(part.path)
            there.append(part)
        except FileNotFoundError as e:
            sealed.losses.extend(_losses(part, part.rows, f"it cannot be read: {e}", now_ns, now_ns))
    if not there:
        return
    tables = {name: known[name] for part in there for name in part.rows if name in known}
    job = worker.start(
        "seal",
        [(part.path, part.length) for part in there],
        lengths=[part.length for part in there],
        tables=pack_tables(tables),
    )
    writing = _Writing(files, root, there, now_ns, sealed)
    try:
        while not job.done:
            for step in job.turn():
                writing.take(step)
        writing.check()
    finally:
        job.close()
        writing.close()


class _Writing:
    """What the steps of a sealing job ask for: segments of the tables and parts that it was given, and no others."""

    def __init__(self, files: Files, root: Path, parts: Sequence[Part], now_ns: int, sealed: Sealed) -> None:
        self._files = files
        self._root = root
        self._parts = parts
        self._now_ns = now_ns
        self._sealed = sealed
        self._numbers = (parts[0].number, parts[-1].number)
        self._left: dict[str, int] = {}
        self._file: SegmentFile | None = None
        self._table = ""

    def take(self, step: Step) -> None:
        header, payload = step
        if "data" in header and self._file is not None:
            self._file.write(payload)
        elif "part" in header:
            self._decoded(self._parts[int(header["part"])], header)
        elif "segment" in header and header["segment"] in self._left and is_date_dir(f"date={header['date']}"):
            self._table = str(header["segment"])
            path = segment_path(self._table, str(header["date"]), self._numbers)
            self._file = SegmentFile(self._files, self._root, path)
        elif "made" in header and self._file is not None:
            made = header["made"]
            self._file.finish(int(made["size"]), int(made["crc"]), self._sealed.written)
            self._left[self._table] -= int(made["rows"])
            self._sealed.segments.append(made_segment(self._table, self._file.path, self._numbers, made))
            self._file = None
        else:
            raise FormatError(f"a sealing job answered {sorted(header)[:5]}")

    def check(self) -> None:
        """Raises FormatError unless all rows that were decoded are in segments."""
        if self._file is not None or any(self._left.values()):
            raise FormatError(f"log parts {self._numbers} gave other rows than were decoded")

    def close(self) -> None:
        """Remove what is not finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.abort()

    def _decoded(self, part: Part, header: Mapping[str, Any]) -> None:
        decoded = {str(name): int(count) for name, count in header["rows"].items()}
        for name, count in decoded.items():
            self._left[name] = self._left.get(name, 0) + count
        missing = {name: n - decoded.get(name, 0) for name, n in part.rows.items() if n > decoded.get(name, 0)}
        start = int(header["created_ns"]) or self._now_ns
        self._sealed.losses.extend(_losses(part, missing, str(header["problem"]), start, self._now_ns))


def made_segment(table: str, path: str, parts: tuple[int, int], made: Mapping[str, Any]) -> Segment:
    """From what a job says of a segment that is in its place."""
    jobs = made.get("jobs")
    return Segment(
        table,
        path,
        int(made["size"]),
        int(made["crc"]),
        int(made["rows"]),
        int(made["ts_min"]),
        int(made["ts_max"]),
        parts,
        None if jobs is None else tuple(map(str, jobs)),
    )


def _losses(part: Part, rows: Mapping[str, int], reason: str, start: int, end: int) -> Iterable[Loss]:
    for name, count in rows.items():
        yield Loss("store", name, "log", f"log part {part.number}: {reason}", min(start, end), end, count)
