"""What tests of one part have in place of the parts around it: a sink, processes, readers and parsers, and clocks.

The clock of a source is ``probing.daemon.clock.FakeClock``.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa

from probing.api.errors import ProbingError, ProcessGone
from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import FileSymbols, matching_symbols
from probing.daemon.ipc import Message
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.source import Identity, Loss
from probing.daemon.source_state import Totals

__all__ = (
    "TOTALS",
    "LiveReaders",
    "Now",
    "Parsers",
    "Processes",
    "Readers",
    "Sink",
    "SkippingLoop",
    "at_once",
    "rows_of",
)

TOTALS = Totals("running", {}, {})
T = TypeVar("T")


def at_once(call: Callable[[], T], /) -> Future[T]:
    """Returns a future that has ended, with the outcome of ``call``."""
    outcome: Future[T] = Future()
    try:
        outcome.set_result(call())
    except Exception as e:
        outcome.set_exception(e)
    return outcome


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a valid batch, times as UTC ns."""
    batch.validate(full=True)
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in batch.columns]
    values = zip(*(column.to_pylist() for column in columns), strict=True)
    return [dict(zip(batch.schema.names, row, strict=True)) for row in values]


class Sink:
    """Keeps what it is given: ``rows`` of all tables, ``batches`` and ``losses``.

    It takes rows of ``tables`` only, if there are any, and no loss without ``may_lose``.
    """

    def __init__(self, *tables: str, may_lose: bool = True) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.losses: list[Loss] = []
        self.read: dict[str, int] = {}
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._tables = tables
        self._may_lose = may_lose

    def put(self, table: str, batch: pa.RecordBatch, read: Mapping[str, int] = MappingProxyType({})) -> None:
        self.read.update(read)
        assert not self._tables or table in self._tables
        self.batches.append(batch)
        self._rows += [(table, row) for row in rows_of(batch)]

    def forget(self, read: Iterable[str]) -> None:
        for name in read:
            self.read.pop(name, None)

    def lost(self, loss: Loss) -> None:
        assert self._may_lose, loss
        self.losses.append(loss)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in list(self._rows)]

    def of(self, table: str) -> list[dict[str, Any]]:
        return [row for name, row in list(self._rows) if name == table]

    def take(self, table: str) -> list[dict[str, Any]]:
        """Returns the rows of ``table`` and forgets them."""
        found = self.of(table)
        self._rows = [(name, row) for name, row in self._rows if name != table]
        return found

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows.clear()

    def events(self, *names: str) -> list[tuple[str, int]]:
        """Returns (event, pid) of the rows of process.events, or of those events only."""
        return [(row["event"], row["pid"]) for row in self.rows if not names or row["event"] in names]


class Processes:
    """The processes that live: ``who``, or whom ``identify`` knows by pid and start. ``asked``: whose identity was."""

    def __init__(self, *who: Identity, identify: Callable[[int, int], Identity | None] | None = None) -> None:
        self.who = list(who)
        self.asked: list[tuple[int, int]] = []
        self._identify = identify or (lambda *key: next((one for one in self.who if one.key == key), None))

    def live(self) -> list[Identity]:
        return self.who

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        self.asked.append((pid, start_ns))
        return self._identify(pid, start_ns)


class Readers:
    """Answers as readers and parsers do, in this process, by a function for each operation.

    It returns a message, what a message has as JSON, or the error to raise; ``failure`` is raised for all. ``asked``:
    operations with arguments.
    """

    size = 1

    def __init__(self, **answers: Callable[[dict[str, Any]], Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.failure: ProbingError | None = None

    def call(
        self, op: str, payload: bytes = b"", *, timeout: float = 2.0, patience: float | None = None, **args: Any
    ) -> Message:
        del payload, timeout, patience
        self.asked.append((op, args))
        answer = self.failure or self.answers[op](args)
        if isinstance(answer, ProbingError):
            raise answer
        return answer if isinstance(answer, Message) else Message({}, json.dumps(answer).encode())

    def call_each(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("one request is enough")

    def forget(self, pid: int, start_ns: int) -> None:
        del pid, start_ns

    def quarantine_s(self, pid: int, start_ns: int) -> float:
        del pid, start_ns
        return 0.0

    def count(self, op: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == op)


class LiveReaders:
    """Answers ``maps`` and ``open`` of live processes as a reader does, in this process."""

    def call(self, op: str, *, pid: int, **args: Any) -> Message:
        try:
            maps = Path(f"/proc/{pid}/maps").read_bytes()
        except OSError as e:
            raise ProcessGone(f"process {pid} has ended") from e
        if op == "maps":
            named = [line for line in maps.splitlines(keepends=True) if b" /" in line]
            return Message({}, b"".join(named) if args.get("files") else maps)
        (mapping,) = [m for m in parse_maps(maps) if m.start == args["start"]]
        return Message({}, fds=[os.open(mapping.path, os.O_RDONLY)])


class Parsers:
    """Finds symbols as a parser does, in this process."""

    def symbols(self, fd: int, patterns: Sequence[str], timeout: float) -> FileSymbols:
        del timeout
        elf = Elf(fd)
        return FileSymbols(tuple(matching_symbols(elf, patterns)), elf.first_vaddr, elf.relocated, elf.machine)


class Now:
    """A function that returns the time ``now``, s."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Skipping(selectors.DefaultSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and 0)
        if not found:
            self.skipped += timeout or 0
        return found


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop of one thread in which time skips to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return super().time() + self._skipping.skipped
