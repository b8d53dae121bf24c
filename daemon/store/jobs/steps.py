"""The work of the store that needs no rights: sealing log parts, merging segments, salvaging damaged ones.

Each job is a generator over open files. It yields steps (header, payload):

* ``{"part", "rows", "created_ns", "problem"}``: a log part (by its index) was decoded; ``rows`` by table.
* ``{"segment", "date"}``: a segment of this table begins. ``{"data"}``: its next bytes, the payload.
* ``{"made": {"size", "crc", "rows", "ts_min", "ts_max", "jobs"}}``: it is complete.
* ``{"lost": {"group", "rows", "ts_min", "ts_max", "why"}}``: a row group that cannot be read; times may be null.
* ``{"turn"}``: a good place to do something else.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.store.jobs.merged_rows import merged_rows
from probing.daemon.store.log.records import unpack_header
from probing.daemon.store.log.tail import decode_tail
from probing.daemon.store.segments.encoding import GROUPS, META, ROW_GROUP, SegmentEncoder
from probing.daemon.store.segments.parquet import open_parquet
from probing.daemon.store.segments.reader import jobs_of, split_by_date, times_of

__all__ = ("JOBS", "Source", "Step", "pack_tables", "segment_steps")

Step = tuple[dict[str, Any], "bytes | memoryview"]
Source = io.RawIOBase | io.BufferedReader
# Of a step: the collector holds one at a time.
_PIECE_BYTES = 1 << 18
_TURN: Step = ({"turn": True}, b"")


def pack_tables(tables: Mapping[str, Table]) -> dict[str, Any]:
    """What a job must know of ``tables``, JSON-able."""
    return {
        name: {"sort_by": list(table.sort_by), "schema": table.physical.serialize().to_pybytes().hex()}
        for name, table in tables.items()
    }


def _unpack_tables(packed: Mapping[str, Any]) -> dict[str, Table]:
    return {
        name: Table(
            name, "", (), tuple(pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(shape["schema"])))),
            tuple(shape["sort_by"]),
        )
        for name, shape in packed.items()
    }  # fmt: skip


def _seal(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """The rows of log parts as one segment a table and date. Fields: ``lengths`` of the parts, ``tables``."""
    known = _unpack_tables(fields["tables"])
    pieces: dict[str, list[pa.Table]] = {}
    for index, source in enumerate(sources):
        header, tables = _decoded(source.read(fields["lengths"][index]) or b"", known)
        yield {"part": index, **header}, b""
        for name, rows in tables.items():
            if rows.num_rows:
                pieces.setdefault(name, []).append(rows)
    for name in sorted(pieces):
        rows = pa.concat_tables(pieces.pop(name), promote_options="permissive")
        sort_by = known[name].sort_by if name in known else ("ts",)
        for date, day in split_by_date(rows.unify_dictionaries(), sort_by):
            yield from segment_steps(name, date, day)


def _decoded(data: bytes, known: Mapping[str, Table]) -> tuple[dict[str, Any], Mapping[str, pa.Table]]:
    try:
        created = unpack_header(data)[0].created_ns
        tail = decode_tail(data, None, known)
    except FormatError as e:
        return {"rows": {}, "created_ns": 0, "problem": f"it cannot be read: {e}"}, {}
    rows = {name: table.num_rows for name, table in tail.tables.items()}
    return {"rows": rows, "created_ns": created, "problem": "; ".join(tail.problems)}, tail.tables


def segment_steps(table: str, date: str, rows: pa.Table) -> Iterator[Step]:
    """A segment of sorted ``rows`` of one date."""
    yield {"segment": table, "date": date}, b""
    encoder = SegmentEncoder(table)
    for start in range(0, rows.num_rows, ROW_GROUP):
        yield from _pieces(encoder.add(rows.slice(start, ROW_GROUP)))
    yield from _end(encoder, **_described(rows))


def _end(encoder: SegmentEncoder, **described: Any) -> Iterator[Step]:
    footer = encoder.end()
    yield from _pieces(footer)
    yield {"made": {"size": encoder.size, "crc": encoder.crc, "rows": encoder.rows, **described}}, b""


def _pieces(data: memoryview) -> Iterator[Step]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield {"data": True}, data[start : start + _PIECE_BYTES]


def _described(rows: pa.Table) -> dict[str, Any]:
    times, jobs = times_of(rows), jobs_of(rows)
    first, last = int(times.min()), int(times.max())
    return {"rows": rows.num_rows, "ts_min": first, "ts_max": last, "jobs": None if jobs is None else list(jobs)}


def _merge(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Segments of one table, in order, as one. Fields: ``table``, ``sort_by``, ``coded`` (columns of few values),
    ``expected`` ([path, size, CRC32] of each)."""
    for source, (path, size, crc) in zip(sources, fields["expected"], strict=True):
        if _checksum(source) != (size, crc):
            raise FormatError(f"the segment {path} is damaged: its size or checksum is wrong")
        yield _TURN
    encoder = SegmentEncoder(str(fields["table"]))
    for rows in merged_rows(sources, tuple(fields["sort_by"]), list(fields["coded"])):
        yield from _pieces(encoder.add(rows))
        yield _TURN
    yield from _end(encoder)


def _checksum(source: Source) -> tuple[int, int]:
    size = crc = 0
    source.seek(0)
    while data := source.read(_PIECE_BYTES):
        size, crc = size + len(data), zlib.crc32(data, crc)
    return size, crc


def _salvage(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """The row groups of a damaged segment that can be read, as a segment.

    Fields: ``table``, ``rows``, ``ts_min``, ``ts_max``, as the manifest has them. Raises FormatError when not even the
    footer can be read, or when it is that of another segment.
    """
    table = str(fields["table"])
    try:
        file = open_parquet(sources[0], None)
        marks = file.metadata.metadata or {}
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"its footer cannot be read: {_line(e)}") from e
    if marks.get(META.encode()) != table.encode() or file.metadata.num_rows != fields["rows"]:
        raise FormatError("its footer is that of another segment")
    # Segments of before have none.
    crcs = marks.get(GROUPS.encode(), b"").split()
    encoder, found = SegmentEncoder(table), list[dict[str, Any]]()
    for group in range(file.metadata.num_row_groups):
        try:
            if crcs:
                _check_group(sources[0], file.metadata.row_group(group), crcs[group])
            rows = _group_rows(file, group)
            described = _described(rows)
            if not fields["ts_min"] <= described["ts_min"] <= described["ts_max"] <= fields["ts_max"]:
                raise FormatError("its rows are of other times than the segment's")
        except (pa.ArrowException, OSError, FormatError, ValueError, IndexError) as e:
            yield {"lost": {"group": group, "why": _line(e), **_of_group(file.metadata, group)}}, b""
        else:
            found.append(described)
            yield from _pieces(encoder.add(rows))
        yield _TURN
    if found:
        yield from _end(encoder, **_together(found))


def _group_rows(file: Any, group: int) -> pa.Table:
    rows: pa.Table = file.read_row_group(group, use_threads=False)
    rows.validate(full=True)
    if not rows.num_rows or rows.num_rows != file.metadata.row_group(group).num_rows:
        raise FormatError("it has other rows than its footer says")
    return rows


def _check_group(source: Source, found: Any, crc: bytes) -> None:
    leaves = [found.column(i) for i in range(found.num_columns)]
    starts = [min(filter(None, (leaf.dictionary_page_offset, leaf.data_page_offset))) for leaf in leaves]
    end = max(start + leaf.total_compressed_size for start, leaf in zip(starts, leaves, strict=True))
    source.seek(min(starts))
    data = source.read(end - min(starts)) or b""
    if zlib.crc32(data) != int(crc, 16):
        raise FormatError("its checksum is wrong")


def _together(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = all(one["jobs"] is not None for one in each)
    jobs = sorted({job for one in each for job in one["jobs"]}) if known else None
    return {"ts_min": min(o["ts_min"] for o in each), "ts_max": max(o["ts_max"] for o in each), "jobs": jobs}


def _of_group(metadata: Any, group: int) -> dict[str, Any]:
    """Rows and times of a row group, as its footer has them."""
    found = metadata.row_group(group)
    leaves = (found.column(i) for i in range(found.num_columns))
    times = next((leaf.statistics for leaf in leaves if leaf.path_in_schema == "ts"), None)
    if times is None or not times.has_min_max:
        return {"rows": found.num_rows, "ts_min": None, "ts_max": None}
    return {"rows": found.num_rows, "ts_min": int(times.min_raw), "ts_max": int(times.max_raw)}


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:200] or type(e).__name__


JOBS: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "merge": _merge,
    "salvage": _salvage,
    "seal": _seal,
}
