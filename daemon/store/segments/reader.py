"""Sealed segments: rows of one table as a Parquet file that any engine reads where it lies."""

from __future__ import annotations

import errno
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.files import FileReader, Files, checksum, write_all
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.encoding import META, column_numbers, sort_rows
from probing.daemon.store.segments.parquet import open_parquet

__all__ = (
    "PASSING",
    "SegmentFile",
    "all_jobs",
    "check_segment",
    "describe_segment",
    "is_date_dir",
    "jobs_of",
    "open_segment",
    "read_segment",
    "salvaged_path",
    "segment_parts",
    "segment_path",
    "split_by_date",
    "times_of",
)

# Of log parts up to MAX_PART.
_NAME = re.compile(r"(0\d{11})-(0\d{11})(?:-s[1-9]\d?)?\.parquet", re.ASCII)
_DATE_DIR = re.compile(r"date=\d{4}-\d{2}-\d{2}", re.ASCII)
_DAY_NS = 86_400_000_000_000
# Times come from our clocks, but a wrong clock must not make a folder for every row.
_MAX_DATES = 8
_BATCH_ROWS = 1 << 13
_MAX_JOBS = 32
_MAX_JOBS_LENGTH = 4096
_MAX_SALVAGES = 99
# Of these a process recovers, and they say nothing of a file.
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def segment_parts(name: str) -> tuple[int, int] | None:
    """The log parts (first, last) in a segment's file name; None for other files."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def is_date_dir(name: str) -> bool:
    return _DATE_DIR.fullmatch(name) is not None


def split_by_date(rows: pa.Table, sort_by: tuple[str, ...]) -> Iterator[tuple[str, pa.Table]]:
    """``rows`` by the UTC date of ``ts`` ("2026-11-21"), each sorted by ``sort_by``."""
    rows = sort_rows(rows, sort_by)
    days = times_of(rows) // _DAY_NS
    distinct = np.unique(days)
    if len(distinct) > _MAX_DATES:
        days[:] = distinct[0]
        distinct = distinct[:1]
    for day in distinct:
        yield _date(int(day)), rows if len(distinct) == 1 else rows.filter(pa.array(days == day))


class SegmentFile:
    """A segment while it is written: aside, until ``finish`` puts it in its place. ``path`` is relative to ``root``.

    Calls raise OSError; after an error only ``abort`` may be called.
    """

    def __init__(self, files: Files, root: Path, path: str) -> None:
        self._files = files
        self._root = root
        self._target = root / path
        self._aside = self._target.with_name(f"{self._target.name}.tmp")
        self.path = path
        self.size = self._crc = 0
        files.make_dir(self._target.parent)
        files.unlink(self._aside)
        self._fd: int | None = files.create(self._aside)

    def write(self, data: bytes | memoryview) -> None:
        assert self._fd is not None
        write_all(self._files, self._fd, data)
        self._crc = zlib.crc32(data, self._crc)
        self.size += len(data)

    def finish(self, size: int, crc: int, written: set[Path]) -> None:
        """Sync, compare with ``size`` and ``crc`` what is on the disk, rename, sync the folders.

        The file is in ``written`` from when it may be there. Raises FormatError when it differs.
        """
        assert self._fd is not None
        self._files.fsync(self._fd)
        self._close()
        if not (size, crc) == (self.size, self._crc) == checksum(self._files, self._aside):
            raise FormatError(f"the segment {self.path} reads back differently than it was written")
        written.add(self._target)
        self._files.rename(self._aside, self._target)
        for folder in (self._target.parent, self._target.parent.parent, self._root):
            self._files.fsync_dir(folder)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._close()
        self._files.unlink(self._aside)

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)


def segment_path(table: str, date: str, parts: tuple[int, int]) -> str:
    """Relative to the state directory."""
    return f"{table}/date={date}/{parts[0]:012d}-{parts[1]:012d}.parquet"


def salvaged_path(path: str) -> str:
    """The name for what is left of the segment ``path``: ``-s1`` behind its parts, then ``-s2``. Raises FormatError."""
    stem, _, times = path.removesuffix(".parquet").partition("-s")
    if int(times or 0) >= _MAX_SALVAGES:
        raise FormatError(f"{path} was damaged too often")
    return f"{stem}-s{int(times or 0) + 1}.parquet"


def read_segment(files: Files, root: Path, segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """The rows, checked against the manifest. Raises FormatError or OSError."""
    if problem := check_segment(files, root, segment):
        raise FormatError(f"the segment {segment.path} is damaged: {problem}")
    try:
        with open_segment(files, root / segment.path, segment.size) as file:
            names = file.schema_arrow.names
            wanted = names if columns is None else [c for c in columns if c in names]
            rows: pa.Table = file.read(columns=wanted, use_threads=False)
            return rows
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"the segment {segment.path} cannot be read: {e}") from e


def check_segment(files: Files, root: Path, segment: Segment) -> str:
    """Why the segment cannot be used; empty when it is as the manifest says."""
    try:
        size, crc = checksum(files, root / segment.path)
    except FileNotFoundError:
        return "it is missing"
    except (OSError, FormatError) as e:
        passing = isinstance(e, OSError) and e.errno in PASSING
        return "" if passing else f"it cannot be read: {e}"
    if size != segment.size:
        return f"it has {size} bytes instead of {segment.size}"
    return "" if crc == segment.crc else "its checksum is wrong"


def describe_segment(files: Files, root: Path, path: str) -> Segment:
    """A segment from its file alone, all its pages checked, for when the manifest is lost.

    Raises FormatError when it is no segment of ours, or OSError.
    """
    size, crc = checksum(files, root / path)
    table, _, name = path.split("/")
    parts = segment_parts(name)
    found: list[Segment] = []
    try:
        with open_segment(files, root / path, size) as file:
            if parts is None or (file.metadata.metadata or {}).get(META.encode()) != table.encode():
                raise FormatError(f"{path} is no segment of probingd")
            # All columns, so that all pages are checked, and never many rows at once.
            batches = file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
            found += (_describe(table, path, pa.Table.from_batches([batch]), parts) for batch in batches)
    except (pa.ArrowException, OSError) as e:
        if getattr(e, "errno", None) is not None:
            raise
        raise FormatError(f"the segment {path} cannot be read: {e}") from e
    if not found:
        raise FormatError(f"{path} has no rows")
    first, last = min(s.ts_min for s in found), max(s.ts_max for s in found)
    return Segment(table, path, size, crc, sum(s.rows for s in found), first, last, found[0].parts, all_jobs(found))


def open_segment(files: Files, path: Path, size: int, coded: Collection[str] = ()) -> Any:
    """``open_parquet`` over a file that is read piece by piece. Raises OSError with a number for the file itself."""
    return open_parquet(pa.PythonFile(FileReader(files, path, size), mode="r"), coded)


def all_jobs(segments: Sequence[Segment]) -> tuple[str, ...] | None:
    """The jobs of segments together, as ``Segment.jobs`` has them."""
    known = [s.jobs for s in segments if s.jobs is not None]
    jobs = sorted({job for found in known for job in found})
    few = len(jobs) <= _MAX_JOBS and sum(map(len, jobs)) <= _MAX_JOBS_LENGTH
    return tuple(jobs) if len(known) == len(segments) and few else None


def _describe(table: str, path: str, rows: pa.Table, parts: tuple[int, int]) -> Segment:
    times = times_of(rows)
    return Segment(table, path, 0, 0, rows.num_rows, int(times.min()), int(times.max()), parts, jobs_of(rows))


def jobs_of(rows: pa.Table) -> tuple[str, ...] | None:
    """As ``Segment.jobs`` has them."""
    if "job" not in rows.column_names:
        return None
    column = rows.column("job").unique()
    if column.null_count or len(column) > _MAX_JOBS:
        return None
    # A table of a user can have numbers there, and a target names its job as long as it likes.
    jobs = sorted(job for job in column.to_pylist() if isinstance(job, str))
    return tuple(jobs) if len(jobs) == len(column) and sum(map(len, jobs)) <= _MAX_JOBS_LENGTH else None


def times_of(rows: pa.Table) -> np.ndarray[Any, Any]:
    """``ts`` in UTC ns; zeros where there is none."""
    if "ts" not in rows.column_names or not pa.types.is_timestamp(rows.schema.field("ts").type):
        return np.zeros(rows.num_rows, np.int64)
    return np.array(column_numbers(rows.column("ts").cast(pa.timestamp("ns"))), np.int64)


def _date(day: int) -> str:
    try:
        return datetime.fromtimestamp(day * 86_400, timezone.utc).strftime("%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return "1970-01-01"
