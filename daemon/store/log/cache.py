"""Caches the decoded rows of log parts between queries: a part only grows, so only its new records are decoded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from probing.api.tables import TABLES, Table
from probing.daemon.store.log.decode import (
    LogRows,
    StreamDecoder,
    bad_from,
    chunks_by_table,
    log_rows,
    read_exactly,
    read_part,
)
from probing.daemon.store.log.records import Record, scan, unpack_header

__all__ = ("LogCache",)

# The maximum size of the cached rows of all parts together, bytes: about one log part of the usual size.
MAX_BYTES = 24 << 20
# The maximum number of pieces of a table in a part. More pieces are joined, because each piece costs DuckDB a batch.
MAX_PIECES = 16


class LogCache:
    """Reads log parts as ``read_part`` does, and caches up to ``max_bytes`` of decoded rows (LRU)."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: dict[tuple[str, int], _Part] = {}

    @property
    def kept_bytes(self) -> int:
        """The size of the cached rows in bytes."""
        return sum(part.size for part in self._parts.values())

    def read(self, path: str, length: int, tables: Collection[str], known: Mapping[str, Table] = TABLES) -> LogRows:
        """Returns the rows of ``tables`` in the first ``length`` bytes of the part. Raises the errors of
        ``read_part``.
        """
        key = (path, Path(path).stat().st_ino)
        part = self._parts.pop(key, None) or _Part(path)
        if part.is_ahead(length, tables):
            # The cache has rows that this older snapshot lacks, so the part is read without the cache.
            self._parts[key] = part
            return read_part(path, length, tables, known)
        try:
            rows = part.read(length, tables, known)
        except MemoryError:
            self._parts.clear()
            raise
        self._parts[key] = part
        while self._parts and self.kept_bytes > self._max_bytes:
            del self._parts[next(iter(self._parts))]
        return rows


class _Part:
    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: dict[str, _TableRows] = {}

    @property
    def size(self) -> int:
        return sum(stream.size for stream in self._streams.values())

    def is_ahead(self, length: int, tables: Iterable[str]) -> bool:
        return any(name in self._streams and self._streams[name].end > length for name in tables)

    def read(self, length: int, tables: Iterable[str], known: Mapping[str, Table]) -> LogRows:
        streams = {name: self._streams.setdefault(name, _TableRows()) for name in tables}
        problems: list[str] = []
        # Tables that were last read up to the same offset are decoded together up to ``length``.
        for end in sorted({stream.end for stream in streams.values()}):
            problems = self._advance({n: s for n, s in streams.items() if s.end == end}, end, length) or problems
        return log_rows(
            ((n, rows, s.problem) for n, s in streams.items() if (rows := s.rows()) is not None), known, problems
        )

    def _advance(self, streams: Mapping[str, _TableRows], end: int, length: int) -> list[str]:
        """Decodes ``streams`` from byte ``end`` to ``length``. Returns the problems of the bytes in between."""
        data = read_exactly(self._path, length - end, end)
        start = unpack_header(data)[1] if not end else 0
        records = list(_consecutive(scan(data, start), next(iter(streams.values())).sequence))
        good = end + (records[-1].end if records else start)
        chunks = chunks_by_table(records, streams)
        for name, stream in streams.items():
            stream.add(chunks.get(name, ()))
            stream.end = good
            stream.sequence = records[-1].sequence if records else stream.sequence
        return [] if good == length else [bad_from(good)]


def _consecutive(records: Iterator[Record], before: int | None) -> Iterator[Record]:
    for record in records:
        if before is not None and record.sequence != before + 1:
            return
        before = record.sequence
        yield record


class _TableRows:
    """The decoded rows of one table in a part, up to byte ``end`` and to record ``sequence``."""

    def __init__(self) -> None:
        self.end = 0
        self.sequence: int | None = None
        self.size = 0
        self._decoder = StreamDecoder()
        self._pieces: list[pa.Table] = []
        self._begun = False

    @property
    def problem(self) -> str:
        return self._decoder.problem

    def rows(self) -> pa.Table | None:
        """Returns the decoded rows; None if the part has no chunk of the table."""
        if self._pieces:
            return pa.concat_tables(self._pieces)
        return pa.table({}) if self._begun else None

    def add(self, chunks: Collection[bytes | memoryview]) -> None:
        self._begun = self._begun or bool(chunks)
        if batches := self._decoder.decode(chunks):
            self._pieces.append(_joined(pa.Table.from_batches(batches)))
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [_joined(pa.concat_tables(self._pieces))]
            self.size = sum(piece.nbytes for piece in self._pieces)


def _joined(rows: pa.Table) -> pa.Table:
    return rows.unify_dictionaries().combine_chunks()
