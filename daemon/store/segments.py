"""Sealed segments: rows of one table as a Parquet file that any engine reads where it lies."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.files import Files, checksum, write_all
from probing.daemon.store.manifest import Segment

__all__ = (
    "ROW_GROUP",
    "check_segment",
    "describe_segment",
    "is_date_dir",
    "read_segment",
    "segment_parts",
    "segment_writer",
    "sort_rows",
    "split_by_date",
    "write_segment",
)

_NAME = re.compile(r"(\d{12})-(\d{12})\.parquet")
_DATE_DIR = re.compile(r"date=\d{4}-\d{2}-\d{2}")
_DAY_NS = 86_400_000_000_000
# Times come from our clocks, but a wrong clock must not make a folder for every row.
_MAX_DATES = 8
ROW_GROUP = 1 << 17
_MAX_JOBS = 32
_MAX_JOBS_LENGTH = 4096
_META = "probingd.segment"


def segment_parts(name: str) -> tuple[int, int] | None:
    """The log parts (first, last) in a segment's file name; None for other files."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def is_date_dir(name: str) -> bool:
    return _DATE_DIR.fullmatch(name) is not None


def sort_rows(rows: pa.Table, sort_by: tuple[str, ...]) -> pa.Table:
    """``rows`` by those of these columns that there are; equal ones stay in their order."""
    return rows.take(pa.array(_order(rows, sort_by)))


def split_by_date(rows: pa.Table, sort_by: tuple[str, ...]) -> Iterator[tuple[str, pa.Table]]:
    """``rows`` by the UTC date of ``ts`` ("2026-11-21"), each sorted by ``sort_by``."""
    rows = sort_rows(rows, sort_by)
    days = _times(rows) // _DAY_NS
    distinct = np.unique(days)
    if len(distinct) > _MAX_DATES:
        days[:] = distinct[0]
        distinct = distinct[:1]
    for day in distinct:
        yield _date(int(day)), rows if len(distinct) == 1 else rows.filter(pa.array(days == day))


def write_segment(
    files: Files, root: Path, table: str, date: str, parts: tuple[int, int], rows: pa.Table, written: set[Path]
) -> Segment:
    """Write aside, sync, verify by reading it again, rename, sync the folder.

    The file is in ``written`` from when it may be there. Raises OSError or FormatError.
    """
    data = _encode(table, rows)
    folder = root / table / f"date={date}"
    files.make_dir(folder)
    name = f"{parts[0]:012d}-{parts[1]:012d}.parquet"
    aside = folder / f"{name}.tmp"
    files.unlink(aside)
    fd = files.create(aside)
    try:
        write_all(files, fd, data)
        files.fsync(fd)
    except OSError:
        files.close(fd)
        files.unlink(aside)
        raise
    files.close(fd)
    segment = _describe(table, f"{table}/date={date}/{name}", data, rows, parts)
    again = files.read(aside)
    if len(again) != segment.size or zlib.crc32(again) != segment.crc or _footer(again).num_rows != rows.num_rows:
        files.unlink(aside)
        raise FormatError(f"the segment {segment.path} reads back differently than it was written")
    written.add(folder / name)
    files.rename(aside, folder / name)
    for path in (folder, folder.parent, root):
        files.fsync_dir(path)
    return segment


def read_segment(files: Files, root: Path, segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """The rows, checked against the manifest. Raises FormatError or OSError."""
    data = files.read(root / segment.path)
    if len(data) != segment.size or zlib.crc32(data) != segment.crc:
        raise FormatError(f"the segment {segment.path} has a wrong size or checksum")
    return _read(data, segment.path, columns)


def check_segment(files: Files, root: Path, segment: Segment) -> str:
    """Why the segment cannot be used; empty when it is as the manifest says."""
    try:
        size, crc = checksum(files, root / segment.path)
    except FileNotFoundError:
        return "it is missing"
    except (OSError, FormatError) as e:
        return f"it cannot be read: {e}"
    if size != segment.size:
        return f"it has {size} bytes instead of {segment.size}"
    return "" if crc == segment.crc else "its checksum is wrong"


def describe_segment(files: Files, root: Path, path: str) -> Segment:
    """A segment from its file alone, all its pages checked, for when the manifest is lost.

    Raises FormatError when it is no segment of ours, or OSError.
    """
    data = files.read(root / path)
    table, _, name = path.split("/")
    parts = segment_parts(name)
    meta = _footer(data).metadata or {}
    if parts is None or meta.get(_META.encode()) != table.encode():
        raise FormatError(f"{path} is no segment of probingd")
    rows = _read(data, path, None)
    if not rows.num_rows:
        raise FormatError(f"{path} has no rows")
    return _describe(table, path, data, rows, parts)


def _describe(table: str, path: str, data: bytes, rows: pa.Table, parts: tuple[int, int]) -> Segment:
    times = _times(rows)
    first, last = int(times.min()), int(times.max())
    return Segment(table, path, len(data), zlib.crc32(data), rows.num_rows, first, last, parts, _jobs(rows))


def _jobs(rows: pa.Table) -> tuple[str, ...] | None:
    if "job" not in rows.column_names:
        return None
    column = rows.column("job").unique()
    if column.null_count or len(column) > _MAX_JOBS:
        return None
    jobs = column.to_pylist()
    # A table of a user can have numbers there, and a target names its job as long as it likes.
    if not all(isinstance(job, str) for job in jobs) or sum(map(len, jobs)) > _MAX_JOBS_LENGTH:
        return None
    return tuple(sorted(jobs))


def _read(data: bytes, path: str, columns: list[str] | None) -> pa.Table:
    # pyarrow.parquet costs memory and start-up time that a daemon which seals nothing need not pay.
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            wanted = names if columns is None else [c for c in columns if c in names]
            return file.read(columns=wanted, use_threads=False)
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"the segment {path} cannot be read: {e}") from e


def _footer(data: bytes) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"a segment has no footer: {e}") from e


@dataclass(frozen=True, slots=True)
class _Layout:
    dictionary: list[str]
    encodings: dict[str, str]


def segment_writer(sink: Any, table: str, rows: pa.Table) -> Any:
    """A ParquetWriter for a segment of ``table`` into ``sink``, encoded as suits ``rows``, the first of it."""
    import pyarrow.parquet as pq

    layout = _layout(rows)
    writer = pq.ParquetWriter(
        sink,
        rows.schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=layout.dictionary,  # type: ignore[arg-type]  # pyarrow takes names, its stubs only bool
        column_encoding=layout.encodings,
        write_statistics=True,
        write_page_checksum=True,
        store_schema=False,
        version="2.6",
    )
    writer.add_key_value_metadata({_META: table})
    return writer


def _encode(table: str, rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with segment_writer(sink, table, rows) as writer:
        writer.write_table(rows, row_group_size=ROW_GROUP)
    return bytes(sink.getvalue())


def _layout(rows: pa.Table) -> _Layout:
    dictionary, encodings = [], {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        kind = column.type
        if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
            dictionary.append(name)
        elif pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
            # Few values, as sizes and ids have, are shorter as codes; times and counters as differences.
            if len(np.unique(_numbers(column))) * 16 <= rows.num_rows:
                dictionary.append(name)
            else:
                encodings[name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(kind):
            encodings[name] = "BYTE_STREAM_SPLIT"
    return _Layout(dictionary, encodings)


def _order(rows: pa.Table, sort_by: tuple[str, ...]) -> np.ndarray[Any, Any]:
    keys = [_sort_key(rows.column(name)) for name in reversed(sort_by) if name in rows.column_names]
    return np.lexsort(keys) if keys else np.arange(rows.num_rows)


def _sort_key(column: pa.ChunkedArray[Any]) -> np.ndarray[Any, Any]:
    if pa.types.is_string(column.type):
        column = column.dictionary_encode()
    if not pa.types.is_dictionary(column.type):
        return _numbers(column)
    array: Any = column.unify_dictionaries().combine_chunks()
    names = array.dictionary.to_pylist()
    rank = {name: i for i, name in enumerate(sorted(set(names)), 1)}
    ranks = np.array([0, *(rank[name] for name in names)])
    return np.asarray(ranks[_numbers(array.indices, null=-1) + 1])


def _numbers(column: Any, null: int = 0) -> np.ndarray[Any, Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(null)
    return np.asarray(column)


def _times(rows: pa.Table) -> np.ndarray[Any, Any]:
    if "ts" not in rows.column_names or not pa.types.is_timestamp(rows.schema.field("ts").type):
        return np.zeros(rows.num_rows, np.int64)
    return np.array(_numbers(rows.column("ts").cast(pa.timestamp("ns"))), np.int64)


def _date(day: int) -> str:
    try:
        return datetime.fromtimestamp(day * 86_400, timezone.utc).strftime("%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return "1970-01-01"
