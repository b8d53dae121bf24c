"""The decoder process: decodes files of the store that somebody else may have written. It has no rights.

Started as ``python -m probing.daemon.confined.store_decoder`` with a connection as descriptor 0. A request comes with
the descriptor of a regular file. An answer is messages ``{"part": TABLE}``, each with an Arrow IPC stream, and then
``{"end": ...}``:

* ``segment``: reads all of a Parquet file and checks its pages. End: ``table`` (from its metadata, or ""),
  ``columns``, ``rows``, ``ts_min``, ``ts_max``, ``jobs`` (at most 32, else null).
* ``rows`` (``piece``, ``skip``): sends the rows, ``piece`` at a time, without the first ``skip`` pieces.
* ``salvage`` (``fields``): runs that task of ``tasks.registry``, and sends its steps ``{"lost"}`` and ``{"data"}``.
* ``header``: of a log part. End: ``number``, ``node``, ``first_sequence``.
* ``log`` (``void_from``, ``send``): decodes a log part, and sends its rows by table if ``send`` is true. End: ``rows``
  by table, ``next_sequence``, ``ts`` ([first, last] by table), ``problems``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa

from probing.api.errors import FormatError, ProbingError, UsageError
from probing.daemon.confined.sandbox import confine, limit
from probing.daemon.confined.serving import inherit, internal_error, serve
from probing.daemon.confined.store_errors import format_error
from probing.daemon.ipc import Message
from probing.daemon.store.log.decode import decode_records
from probing.daemon.store.log.records import PartHeader, Record, cut_short, scan, unpack_header
from probing.daemon.store.segments.parquet import open_parquet
from probing.daemon.store.tasks.messages import Data, LostGroup, pack_step
from probing.daemon.store.tasks.registry import TASKS

__all__ = ("main",)

BATCH_ROWS = 1 << 16
MAX_JOBS = 32
MEMORY_BYTES = 3 << 30
# For the life of the process: enough for a directory of some 100 GB.
CPU_SECONDS = 4 * 3600
MAX_LOG_BYTES = 1 << 30
_MARKS = (b"probingd.segment", b"probingd.table")
Send = Callable[[dict[str, Any], "bytes | memoryview"], None]


def main() -> int:
    """Serves the connection at descriptor 0 until it closes."""
    channel = inherit(_give_up_rights)
    serve(channel, lambda request: Message({"end": _answer(request, channel.send)}), _error_of)
    return 0


def _give_up_rights() -> None:
    limit(MEMORY_BYTES, CPU_SECONDS)
    # Imported before its files are out of reach.
    import pyarrow.parquet  # noqa: F401

    confine(())


def _error_of(e: Exception) -> ProbingError:
    if isinstance(e, MemoryError):
        return FormatError("it asks for more memory than there is for it")
    return format_error(e) or internal_error("a decoder", e)


def _answer(request: Message, send: Send) -> dict[str, Any]:
    op, header = request.header.get("op"), request.header
    if op == "ping":
        return {}
    file = os.fdopen(request.take_fd(), "rb")
    with file:
        if op == "segment":
            return _segment(file)
        if op == "rows":
            return _rows(file, int(header["piece"]), int(header["skip"]), send)
        if op == "salvage":
            for step in TASKS["salvage"]([file], header["fields"]):
                if isinstance(step, LostGroup | Data):
                    send(*pack_step(step))
            return {}
        if op == "header":
            return _header(_log(file))
        if op == "log":
            void = header.get("void_from")
            return _log_rows(_log(file), None if void is None else int(void), send if header["send"] else None)
    raise UsageError(f"a decoder knows no request {op!r}")


def _footer(parquet: Any) -> dict[str, Any]:
    meta = parquet.metadata.metadata or {}
    table = next((meta[mark].decode() for mark in _MARKS if mark in meta), "")
    return {"table": table[:256], "columns": parquet.schema_arrow.names, "rows": parquet.metadata.num_rows}


def _segment(file: io.BufferedReader) -> dict[str, Any]:
    parquet = open_parquet(file, None)
    found = _footer(parquet)
    rows, times, jobs = 0, _Times(), set[Any]()
    for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
        batch.validate(full=True)
        rows += batch.num_rows
        times.add(batch)
        if "job" in batch.schema.names and len(jobs) <= MAX_JOBS:
            jobs.update(batch.column("job").unique().to_pylist())
    if rows != found["rows"]:
        raise FormatError(f"its footer says {found['rows']} rows, it has {rows}")
    names = sorted(job for job in jobs if isinstance(job, str))
    known = bool(names) and len(names) == len(jobs) <= MAX_JOBS
    first, last = times.span
    return {**found, "ts_min": first, "ts_max": last, "jobs": names if known else None}


class _Times:
    """The first and the last ``ts`` of batches, UTC ns; 0 without a ``ts``, as in the manifest."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = 0

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        if "ts" not in batch.schema.names or not pa.types.is_timestamp(batch.schema.field("ts").type):
            return
        import pyarrow.compute as pc

        column: Any = batch.column("ts").cast(pa.timestamp("ns")).cast(pa.int64())
        found: Any = pc.min_max(column.fill_null(0)).as_py()
        if found["min"] is not None:
            self._first = found["min"] if self._first is None else min(self._first, found["min"])
            self._last = max(self._last, found["max"])

    @property
    def span(self) -> tuple[int, int]:
        return self._first or 0, self._last


def _rows(file: io.BufferedReader, piece: int, skip: int, send: Send) -> dict[str, Any]:
    parquet = open_parquet(file, None)
    found = _footer(parquet)
    for number, batch in enumerate(parquet.iter_batches(piece, use_threads=False)):
        batch.validate(full=True)
        if number >= skip:
            send({"part": found["table"]}, _stream(pa.Table.from_batches([batch])))
    return found


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def _log(file: io.BufferedReader) -> bytes:
    data = file.read(MAX_LOG_BYTES + 1)
    if len(data) > MAX_LOG_BYTES:
        raise FormatError(f"a log part of more than {MAX_LOG_BYTES} bytes")
    return data


def _header(data: bytes) -> dict[str, Any]:
    header, _ = unpack_header(data)
    return {"number": header.number, "node": header.node[:256], "first_sequence": header.first_sequence}


def _log_rows(data: bytes, void_from: int | None, send: Send | None) -> dict[str, Any]:
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
        if send is not None and rows.num_rows:
            send({"part": name}, _stream(rows))
    return {"rows": counts, "ts": spans, "next_sequence": sequence, "problems": problems}


def _good_records(data: bytes, header: PartHeader, start: int, void_from: int | None) -> tuple[list[Record], int]:
    """Returns the records below ``void_from``, and the offset behind the last of them."""
    records: list[Record] = []
    for record in scan(data, start):
        if record.sequence != header.first_sequence + len(records):
            break
        if void_from is not None and record.sequence >= void_from:
            break
        records.append(record)
        start = record.end
    return records, start


if __name__ == "__main__":
    raise SystemExit(main())
