"""Reads segments, and checks them against the manifest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.files import TRANSIENT, FileReader, Files, checksum
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.contents import all_jobs, jobs_of, times_of
from probing.daemon.store.segments.encoding import META
from probing.daemon.store.segments.files import segment_parts
from probing.daemon.store.segments.parquet import open_parquet

__all__ = ("check_segment", "describe_segment", "open_segment", "read_segment")

_BATCH_ROWS = 1 << 13


def read_segment(files: Files, root: Path, segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """Returns the rows of a segment, whose file must agree with the manifest. Raises FormatError or OSError."""
    if problem := check_segment(files, root, segment):
        raise FormatError(f"the segment {segment.path} is damaged: {problem}")
    try:
        with open_segment(files, root / segment.path, segment.size) as file:
            names = file.schema_arrow.names
            chosen = names if columns is None else [c for c in columns if c in names]
            rows: pa.Table = file.read(columns=chosen, use_threads=False)
            return rows
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"the segment {segment.path} cannot be read: {e}") from e


def check_segment(files: Files, root: Path, segment: Segment) -> str:
    """Returns why the segment cannot be used; empty if size and checksum agree with the manifest."""
    try:
        size, crc = checksum(files, root / segment.path)
    except FileNotFoundError:
        return "it is missing"
    except (OSError, FormatError) as e:
        transient = isinstance(e, OSError) and e.errno in TRANSIENT
        return "" if transient else f"it cannot be read: {e}"
    if size != segment.size:
        return f"it has {size} bytes instead of {segment.size}"
    return "" if crc == segment.crc else "its checksum is wrong"


def describe_segment(files: Files, root: Path, path: str) -> Segment:
    """Returns the manifest's entry of a segment, made from its file alone, and checks all its pages.

    Raises OSError, or FormatError when the file is not a good segment of probingd.
    """
    size, crc = checksum(files, root / path)
    table, _, name = path.split("/")
    parts = segment_parts(name)
    pieces: list[Segment] = []
    try:
        with open_segment(files, root / path, size) as file:
            if parts is None or (file.metadata.metadata or {}).get(META.encode()) != table.encode():
                raise FormatError(f"{path} is not a segment of probingd")
            # All columns are read, so that every page is checked. Few rows are read at once, to save memory.
            batches = file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
            pieces += (_describe(table, path, pa.Table.from_batches([batch]), parts) for batch in batches)
    except (pa.ArrowException, OSError) as e:
        if getattr(e, "errno", None) is not None:
            raise
        raise FormatError(f"the segment {path} cannot be read: {e}") from e
    if not pieces:
        raise FormatError(f"{path} has no rows")
    first, last = min(s.ts_min for s in pieces), max(s.ts_max for s in pieces)
    return Segment(table, path, size, crc, sum(s.rows for s in pieces), first, last, pieces[0].parts, all_jobs(pieces))


def open_segment(files: Files, path: Path, size: int, coded: Collection[str] = ()) -> Any:
    """Opens the file ``path`` with ``open_parquet``, and reads it piece by piece. An OSError with errno comes from the
    file system.
    """
    return open_parquet(pa.PythonFile(FileReader(files, path, size), mode="r"), coded)


def _describe(table: str, path: str, rows: pa.Table, parts: tuple[int, int]) -> Segment:
    times = times_of(rows)
    return Segment(table, path, 0, 0, rows.num_rows, int(times.min()), int(times.max()), parts, jobs_of(rows))
