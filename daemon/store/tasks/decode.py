"""The tasks that decode an untrusted file: a segment, or a part of the log.

Each task reads one open file, checks all that it reads, and raises FormatError or an error of Arrow for a damaged file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.ipc import Header
from probing.daemon.store.log.decode import decode_records
from probing.daemon.store.log.records import PartHeader, Record, cut_short, scan, unpack_header
from probing.daemon.store.segments.parquet import open_parquet
from probing.daemon.store.tasks.messages import Contents, Rows, Step
from probing.daemon.store.tasks.segment_output import Source

__all__ = ("DECODING",)

BATCH_ROWS = 1 << 16
MAX_JOBS = 32
MAX_LOG_BYTES = 1 << 30
_MARKS = (b"probingd.segment", b"probingd.table")


def _segment(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Reads a whole Parquet file, checks its pages, and yields its contents.

    The contents have ``table`` (from its metadata, or ""), ``columns``, ``rows``, ``ts_min``, ``ts_max``, ``jobs`` (at
    most 32, else None).
    """
    del fields
    parquet = open_parquet(sources[0], None)
    footer = _footer(parquet)
    rows, times, jobs = 0, _Times(), set[Any]()
    for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
        batch.validate(full=True)
        rows += batch.num_rows
        times.add(batch)
        if "job" in batch.schema.names and len(jobs) <= MAX_JOBS:
            jobs.update(batch.column("job").unique().to_pylist())
    if rows != footer["rows"]:
        raise FormatError(f"it has {rows} rows, its footer says {footer['rows']}")
    names = sorted(job for job in jobs if isinstance(job, str))
    named = bool(names) and len(names) == len(jobs) <= MAX_JOBS
    first, last = times.span
    yield Contents({**footer, "ts_min": first, "ts_max": last, "jobs": names if named else None})


def _segment_rows(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Yields the rows of a Parquet file in pieces of ``piece`` rows, without the first ``skip`` pieces."""
    parquet = open_parquet(sources[0], None)
    table = _footer(parquet)["table"]
    for number, batch in enumerate(parquet.iter_batches(int(fields["piece"]), use_threads=False)):
        batch.validate(full=True)
        if number >= int(fields["skip"]):
            yield Rows(table, _stream(pa.Table.from_batches([batch])))


def _log_header(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Yields the contents of a log part's header: ``number``, ``node`` and ``first_sequence``."""
    del fields
    header, _ = unpack_header(_log_bytes(sources[0]))
    yield Contents({"number": header.number, "node": header.node[:256], "first_sequence": header.first_sequence})


def _log(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Decodes a log part up to its first bad record, or to the sequence number ``void_from``; yields its rows by table
    if ``send`` is true, and then its contents.

    Contents: ``rows`` by table, ``next_sequence``, ``times`` ([first, last] by table), ``problems``.
    """
    data, void_from = _log_bytes(sources[0]), fields["void_from"]
    header, start = unpack_header(data)
    records, end = _good_records(data, header, start, void_from)
    sequence = header.first_sequence + len(records)
    log = decode_records(records)
    problems = list(log.problems)
    void = void_from is not None and sequence >= void_from
    if end < len(data) and not void and not cut_short(data, end):
        problems.append(f"it is bad from byte {end} on")
    counts, spans = {}, {}
    for name, rows in log.tables.items():
        rows.validate(full=True)
        times = _Times()
        times.add(rows.combine_chunks())
        counts[name], spans[name] = rows.num_rows, list(times.span)
        if fields["send"] and rows.num_rows:
            yield Rows(name, _stream(rows))
    yield Contents({"rows": counts, "times": spans, "next_sequence": sequence, "problems": problems})


DECODING: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "header": _log_header,
    "log": _log,
    "rows": _segment_rows,
    "segment": _segment,
}


def _footer(parquet: Any) -> Header:
    meta = parquet.metadata.metadata or {}
    table = next((meta[mark].decode() for mark in _MARKS if mark in meta), "")
    return {"table": table[:256], "columns": parquet.schema_arrow.names, "rows": parquet.metadata.num_rows}


class _Times:
    """The first and the last ``ts`` of batches, UTC ns; 0 for rows without ``ts``, as in the manifest."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = 0

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        if "ts" not in batch.schema.names or not pa.types.is_timestamp(batch.schema.field("ts").type):
            return
        import pyarrow.compute as pc

        column: Any = batch.column("ts").cast(pa.timestamp("ns")).cast(pa.int64())
        span: Any = pc.min_max(column.fill_null(0)).as_py()
        if span["min"] is not None:
            self._first = span["min"] if self._first is None else min(self._first, span["min"])
            self._last = max(self._last, span["max"])

    @property
    def span(self) -> tuple[int, int]:
        return self._first or 0, self._last


def _stream(rows: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return memoryview(sink.getvalue())


def _log_bytes(file: Source) -> bytes:
    data = file.read(MAX_LOG_BYTES + 1) or b""
    if len(data) > MAX_LOG_BYTES:
        raise FormatError(f"the log part has more than {MAX_LOG_BYTES} bytes")
    return data


def _good_records(data: bytes, header: PartHeader, start: int, void_from: int | None) -> tuple[list[Record], int]:
    """Returns the records below ``void_from``, and the offset after the last of them."""
    records: list[Record] = []
    for record in scan(data, start):
        if record.sequence != header.first_sequence + len(records):
            break
        if void_from is not None and record.sequence >= void_from:
            break
        records.append(record)
        start = record.end
    return records, start
