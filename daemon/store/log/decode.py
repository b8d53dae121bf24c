"""Decodes the rows of log parts. Only this module turns log records into Arrow tables again.

Queries (``cache``), sealing, recovery's checks and ``verify`` all decode through ``StreamDecoder``.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import TABLES, Table
from probing.daemon.store.files import read_file
from probing.daemon.store.log.records import Record, scan, unpack_header
from probing.daemon.store.log.streams import conform

__all__ = (
    "LogRows",
    "StreamDecoder",
    "bad_from",
    "chunks_by_table",
    "decode_part",
    "decode_records",
    "decode_stream",
    "log_rows",
    "read_exactly",
    "read_part",
)

_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


class LogRows(NamedTuple):
    """Rows by table, in the physical schemas of the tables. ``problems``: a line for each table, or range of bytes,
    that could not be decoded.
    """

    tables: dict[str, pa.Table]
    problems: tuple[str, ...] = ()


class StreamDecoder:
    """Decodes the Arrow IPC stream of one table in one log part, chunk by chunk.

    ``problem``: why the stream cannot be decoded further, or "".
    """

    def __init__(self) -> None:
        self.problem = ""
        self._feed = _Feed()
        self._reader: pa.RecordBatchStreamReader | None = None

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of the stream; None until the first chunk was decoded."""
        return None if self._reader is None else self._reader.schema

    def decode(self, chunks: Iterable[bytes | memoryview]) -> list[pa.RecordBatch]:
        """Returns the batches of the next ``chunks``, fully validated, up to the first ``problem``."""
        self._feed.put(chunks)
        batches: list[pa.RecordBatch] = []
        try:
            while self._feed.has_more and not self.problem:
                if self._reader is None:
                    reader = pa.ipc.open_stream(pa.PythonFile(self._feed, mode="r"), options=_OPTIONS)
                    # Arrow checks the names of columns for UTF-8 only when they are first read, so this line reads
                    # them.
                    _ = reader.schema.names
                    self._reader = reader
                batch = self._reader.read_next_batch()
                # The validation is full, because an index beyond its dictionary would read memory of other data.
                batch.validate(full=True)
                batches.append(batch)
        except StopIteration:
            self.problem = "the stream ends before its rows"
        except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
            self.problem = f"{e}"
        return batches


class _Feed(io.RawIOBase):
    """A growing file for Arrow's reader."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: deque[memoryview] = deque()

    @property
    def has_more(self) -> bool:
        return bool(self._pieces)

    def put(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces.extend(memoryview(piece) for piece in pieces if len(piece))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        read: list[memoryview] = []
        while self._pieces and size:
            piece = self._pieces.popleft()
            if 0 <= size < len(piece):
                self._pieces.appendleft(piece[size:])
                piece = piece[:size]
            read.append(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(read)


def read_part(
    path: str | Path, length: int, tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> LogRows:
    """Returns the rows of ``tables`` (None: of all) in the first ``length`` bytes of the log part ``path``.

    Raises FormatError or OSError when the part cannot be opened. Rows before damage inside the part are returned.
    """
    return decode_part(read_exactly(path, length), tables, known)


def read_exactly(path: str | Path, length: int, offset: int = 0) -> bytes:
    """Returns ``length`` bytes of a log part. Raises OSError, or FormatError when the part is shorter."""
    data = read_file(path, length, offset)
    if len(data) < length:
        raise FormatError(f"the log part {Path(path).name} is shorter than its snapshot says")
    return data


def decode_part(
    data: bytes | memoryview, tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> LogRows:
    """Returns the rows of a part in memory, as ``read_part`` does for a file."""
    _, start = unpack_header(data)
    records = list(scan(data, start))
    end = records[-1].end if records else start
    rows = decode_records(records, tables, known)
    if end != len(data):
        return LogRows(rows.tables, (*rows.problems, bad_from(end)))
    return rows


def bad_from(offset: int) -> str:
    """Returns the problem of a part whose bytes from ``offset`` on are not records."""
    return f"the log part is bad from byte {offset} on"


def decode_records(
    records: Iterable[Record], tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> LogRows:
    """Returns the rows of a part's ``records``. Tables that are not in ``known`` keep the schema with which they were
    written.
    """
    decoded = ((name, *decode_stream(chunks)) for name, chunks in chunks_by_table(records, tables).items())
    return log_rows(decoded, known)


def decode_stream(chunks: Sequence[bytes | memoryview]) -> tuple[pa.Table, str]:
    """Returns (rows, problem) of a whole stream. ``problem``: why the stream breaks off, or ""."""
    decoder = StreamDecoder()
    batches = decoder.decode(chunks)
    schema = decoder.schema
    rows = pa.table({}) if schema is None else pa.Table.from_batches(batches, schema=schema).unify_dictionaries()
    return rows, decoder.problem


def chunks_by_table(
    records: Iterable[Record], tables: Collection[str] | None = None
) -> dict[str, list[bytes | memoryview]]:
    """Returns the chunks of each of ``tables`` (None: of all tables), in the order of ``records``."""
    chunks: dict[str, list[bytes | memoryview]] = {}
    for record in records:
        for chunk in record.chunks:
            if tables is None or chunk.table in tables:
                chunks.setdefault(chunk.table, []).append(chunk.data)
    return chunks


def log_rows(
    decoded: Iterable[tuple[str, pa.Table, str]], known: Mapping[str, Table], problems: Iterable[str] = ()
) -> LogRows:
    """Returns the rows of ``decoded``, tuples (table, rows, problem), in the physical schemas of ``known``. The
    problems of ``decoded`` are appended to ``problems``.
    """
    tables: dict[str, pa.Table] = {}
    lines = list(problems)
    for name, rows, problem in decoded:
        try:
            tables[name] = conform(rows, known[name].physical) if name in known else rows
        except pa.ArrowException as e:
            problem = str(e)
        if problem:
            lines.append(f"{name}: {problem.splitlines()[0]}")
    return LogRows(tables, tuple(lines))
