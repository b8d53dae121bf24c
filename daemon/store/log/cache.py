"""Rows of the write-ahead log, remembered from query to query: a part only grows, so only what is new is decoded."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import TABLES, Table
from probing.daemon.store.files import read_file
from probing.daemon.store.log.records import scan, unpack_header
from probing.daemon.store.log.streams import conform
from probing.daemon.store.log.tail import Tail, read_tail

__all__ = ("Tails",)

# Of rows that stay decoded: a part of the log at its usual size.
MAX_BYTES = 24 << 20
# So many pieces of a table are made one; each costs DuckDB a batch.
MAX_PIECES = 16
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


class Tails:
    """Decodes parts of the log like ``read_tail``, and keeps the rows of the latest up to ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: dict[tuple[str, int], _Part] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of rows that are kept."""
        return sum(part.size for part in self._parts.values())

    def read(self, path: str, length: int, tables: Collection[str], known: Mapping[str, Table] = TABLES) -> Tail:
        """The rows of ``tables`` in the first ``length`` bytes of the part ``path``.

        Raises FormatError or OSError when it cannot be opened; a part that is bad inside gives what is before.
        """
        key = (path, Path(path).stat().st_ino)
        part = self._parts.pop(key, None) or _Part(path)
        if part.ahead(length, tables):
            # A snapshot from before: what is kept is more than it has.
            self._parts[key] = part
            return read_tail(path, length, tables, known)
        try:
            tail = part.read(length, tables, known)
        except MemoryError:
            self._parts.clear()
            raise
        self._parts[key] = part
        while self._parts and self.kept_bytes > self._max_bytes:
            del self._parts[next(iter(self._parts))]
        return tail


class _Part:
    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: dict[str, _Stream] = {}

    @property
    def size(self) -> int:
        return sum(stream.size for stream in self._streams.values())

    def ahead(self, length: int, tables: Iterable[str]) -> bool:
        return any(name in self._streams and self._streams[name].end > length for name in tables)

    def read(self, length: int, tables: Iterable[str], known: Mapping[str, Table]) -> Tail:
        streams = {name: self._streams.setdefault(name, _Stream()) for name in tables}
        problems = []
        for end in sorted({stream.end for stream in streams.values()}):
            together = {name: stream for name, stream in streams.items() if stream.end == end}
            bad_from = self._advance(together, end, length)
            if bad_from is not None:
                problems = [f"the log part is bad from byte {bad_from} on"]
        rows: dict[str, pa.Table] = {}
        for name, stream in streams.items():
            problem, decoded = stream.problem, stream.rows()
            if decoded is not None:
                try:
                    rows[name] = conform(decoded, known[name].physical)
                except pa.ArrowException as e:
                    problem = str(e)
            if problem:
                problems.append(f"{name}: {problem.splitlines()[0]}")
        return Tail(rows, tuple(problems))

    def _advance(self, streams: Mapping[str, _Stream], end: int, length: int) -> int | None:
        """Bring ``streams``, which have been read up to ``end``, up to ``length``. Returns where it is bad from, or
        None when it is good."""
        data = read_file(self._path, length - end, end)
        if len(data) < length - end:
            raise FormatError(f"the log part {Path(self._path).name} is shorter than its snapshot says")
        start = unpack_header(data)[1] if not end else 0
        before = next(iter(streams.values())).sequence
        chunks: dict[str, list[bytes | memoryview]] = {name: [] for name in streams}
        good, sequence = end + start, before
        for record in scan(data, start):
            if sequence is not None and record.sequence != sequence + 1:
                break
            good, sequence = end + record.end, record.sequence
            for chunk in record.chunks:
                if chunk.table in chunks:
                    chunks[chunk.table].append(chunk.data)
        for name, stream in streams.items():
            stream.add(chunks[name])
            stream.end, stream.sequence = good, sequence
        return None if good == length else good


class _Stream:
    """The rows of one table in a part: ``end`` is the offset behind the last record that was looked at."""

    def __init__(self) -> None:
        self.end = 0
        self.sequence: int | None = None
        self.problem = ""
        self.size = 0
        self._feed = _Feed()
        self._reader: pa.RecordBatchStreamReader | None = None
        self._pieces: list[pa.Table] = []

    def rows(self) -> pa.Table | None:
        return pa.concat_tables(self._pieces) if self._pieces else None

    def add(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._feed.put(chunks)
        batches: list[pa.RecordBatch] = []
        try:
            while self._feed.has_more and not self.problem:
                if self._reader is None:
                    self._reader = pa.ipc.open_stream(pa.PythonFile(self._feed, mode="r"), options=_OPTIONS)
                batch = self._reader.read_next_batch()
                # In full: a code of a name that is not there would be read from somewhere else in memory.
                batch.validate(full=True)
                batches.append(batch)
        except StopIteration:
            self.problem = "the stream ends before its rows"
        except (pa.ArrowException, OSError) as e:
            self.problem = f"{e}"
        if batches:
            self._pieces.append(_joined(pa.Table.from_batches(batches)))
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [_joined(pa.concat_tables(self._pieces))]
            self.size = sum(piece.nbytes for piece in self._pieces)


def _joined(rows: pa.Table) -> pa.Table:
    return rows.unify_dictionaries().combine_chunks()


class _Feed(io.RawIOBase):
    """A file that grows: Arrow's reader copies from it what has been put there."""

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
        found: list[Any] = []
        while self._pieces and size:
            piece = self._pieces.popleft()
            if 0 <= size < len(piece):
                self._pieces.appendleft(piece[size:])
                piece = piece[:size]
            found.append(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(found)
