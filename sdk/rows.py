"""Tables that a job writes itself: rows in shared memory, which the daemon reads from outside.

A table has a memory file (memfd) of its own: a header of 8 KiB that describes the table, and a ring of slots of one
size. A row is packed into a slot by a single call; a full ring overwrites its oldest rows, and the daemon counts the
rows that it missed. A writer takes no lock, makes no system call after the first row, and never waits. Without a daemon
nobody reads the memory, which is freed when the process ends.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import mmap
import operator
import os
import re
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    # (name, type: i64, f64 or text, size in bytes).
    Column = tuple[str, str, int]

__all__ = (
    "HEAD",
    "HEADER_BYTES",
    "LONG",
    "MAGIC",
    "MEMORY_NAME",
    "NO_INTEGER",
    "NO_TEXT",
    "SHORT",
    "ExternalTable",
    "FixedTable",
)

MAGIC = b"PRBROWS1"
# Magic, bytes of a slot, number of slots, length of the description; the description as JSON follows.
HEAD = struct.Struct("<8sIII")
HEADER_BYTES = 8192
RING_BYTES = 1 << 20
MAX_TABLES = 32
MAX_COLUMNS = 64
MEMORY_NAME = "probing-rows"
NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
# The sizes of a text column, in bytes, including the length byte. Most texts are names, which fit into SHORT; a text
# that does not fit into LONG is truncated.
SHORT, LONG = 64, 256
# The values that stand for None (as does NaN): the smallest integer, and a byte that begins no text in UTF-8.
NO_INTEGER, NO_TEXT = -(1 << 63), b"\xff"
# F_ADD_SEALS, and F_SEAL_SEAL | _SHRINK | _GROW of linux/fcntl.h: the module fcntl has them only since Python 3.9.
_ADD_SEALS, _SEALS = 1033, 1 | 2 | 4
# The maximum number of rings that are kept after the types of the columns have changed, because the daemon may still
# read their rows. Types change rarely.
_MAX_OLDER = 4


class _LockedCount:
    """Counts from 1 for interpreters without a GIL, where ``itertools.count`` may give two threads the same number."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), 0

    def __next__(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def __iter__(self) -> Iterator[int]:
        return self


def _numbers() -> Iterator[int]:
    return itertools.count(1) if getattr(sys, "_is_gil_enabled", lambda: True)() else _LockedCount()


class _Ring:
    """The memory file of a table. ``columns``: for each column its name, type (i64, f64 or text) and size in bytes."""

    def __init__(self, table: str, columns: Sequence[Column]) -> None:
        kinds = {"i64": "q", "f64": "d"}
        self.numbers = _numbers()
        # Number of the row, CLOCK_MONOTONIC ns, the time that the caller gave, the values, and the number again: a row
        # whose two numbers differ is not complete.
        row = struct.Struct("<Qqq" + "".join(kinds.get(kind, f"{size}p") for _, kind, size in columns) + "Q")
        self.columns = columns
        self.row = row
        self.count = RING_BYTES // row.size
        size = HEADER_BYTES + self.count * row.size
        text = json.dumps({"table": table, "columns": columns}).encode()
        if HEAD.size + len(text) > HEADER_BYTES:
            raise ValueError(f"the names of the columns of {table} take more than {HEADER_BYTES} bytes")
        self.fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # The daemon maps the file, so the file must not shrink.
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory[HEAD.size : HEAD.size + len(text)] = text
        # The magic comes last: a reader that sees it sees the description, too.
        HEAD.pack_into(self.memory, 0, b"", row.size, self.count, len(text))
        self.memory[: len(MAGIC)] = MAGIC
        self.texts = [number for number, (_, kind, _) in enumerate(columns) if kind == "text"]

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)

    def put(self, number: int, t: int, values: Sequence[Any]) -> None:
        """Writes the row ``number``. Raises struct.error, TypeError or ValueError if a value does not fit."""
        place = HEADER_BYTES + number % self.count * self.row.size
        self.row.pack_into(self.memory, place, number, time.monotonic_ns(), t, *values, number)

    def rows(self) -> list[tuple[int, tuple[Any, ...]]]:
        """Returns the rows that are in memory, oldest first, each with its number."""
        found = []
        for slot in range(self.count):
            fields = self.row.unpack_from(self.memory, HEADER_BYTES + slot * self.row.size)
            if fields[0] and fields[0] == fields[-1]:
                found.append((fields[0], fields[1:-1]))
        return sorted(found)


class FixedTable:
    """A table of the library itself, whose columns have types from the start. The first row creates its memory."""

    _tables: ClassVar[list[FixedTable]] = []

    def __init__(self, name: str, columns: Sequence[Column]) -> None:
        self._name, self._columns = name, columns
        self._ring: _Ring | None = None
        self._guard = threading.Lock()
        self.works = hasattr(os, "memfd_create")
        self.refused = 0
        self._tables.append(self)

    def write(self, *values: Any) -> None:
        """Writes a row. Texts are given as bytes, and None as NO_INTEGER, NaN or NO_TEXT. A row with a value that does
        not fit raises nothing, and is counted in ``refused``.
        """
        ring = self._ring
        if ring is None:
            ring = self._made() if self.works else None
            if ring is None:
                return
        try:
            ring.put(next(ring.numbers), NO_INTEGER, values)
        except (struct.error, TypeError, ValueError):  # reporting must not end a training job
            self.refused += 1

    def _made(self) -> _Ring | None:
        with self._guard:
            if self._ring is None:
                try:
                    self._ring = _Ring(self._name, self._columns)
                except OSError:
                    # No descriptor or no memory is left: the job goes on without the table.
                    self.works = False
            return self._ring

    @classmethod
    def forked(cls) -> None:
        """Called in a forked child: closes the memory of the parent. The child writes its rows to new memory."""
        for table in cls._tables:
            table._guard = threading.Lock()
            if table._ring is not None:
                table._ring.close()
                table._ring = None


class ExternalTable:
    """A table that the job fills; queries name it ``python.NAME``. ``columns``: the names of its columns.

    The first row gives the types: integers, floating-point numbers, or texts of at most 255 bytes; None fits all
    types. A later value of another type changes the column's type. A row that cannot be stored raises nothing, because
    reporting must not end a training job; it is counted in ``refused``. Raises ValueError for an invalid name, and for
    more than 32 tables.

    The arguments after ``columns`` exist for compatibility with Probing and are ignored: the daemon's limits apply.
    """

    _tables: ClassVar[dict[str, ExternalTable]] = {}
    _guard = threading.Lock()

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        chunk_size: int = 10_000,  # noqa: ARG002
        discard_threshold: int = 20_000_000,  # noqa: ARG002
        discard_strategy: str = "BaseMemorySize",  # noqa: ARG002
    ) -> None:
        names = list(columns)
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a table: use a-z, 0-9 and _, at most 41 characters, a letter first")
        wrong = [column for column in names if not NAME.fullmatch(column) or "__" in column or names.count(column) > 1]
        if wrong or not 0 < len(names) <= MAX_COLUMNS:
            what = f"{wrong[0]!r} cannot name a column" if wrong else f"a table has 1 to {MAX_COLUMNS} columns"
            raise ValueError(f"{what}: column names must differ, and consist of a-z, 0-9 and single _")
        self.name = name
        self.refused = 0
        self._names = names
        self._ring: _Ring | None = None
        self._older: list[_Ring] = []
        self._replaced: list[_Ring] = []
        with self._guard:
            before = self._tables.get(name)
            if before is None and len(self._tables) >= MAX_TABLES:
                raise ValueError(f"a process has at most {MAX_TABLES} tables")
            self._tables[name] = self
            if before is not None:
                # The daemon may still read the rows of the tables that had this name.
                self._replaced = _kept([*before._replaced, *before._rings()])
                before._ring, before._older, before._replaced = None, [], []

    @classmethod
    def get(cls, name: str) -> ExternalTable:
        """Returns the table of this name. Raises ValueError if the process has not made it."""
        try:
            return cls._tables[name]
        except KeyError:
            raise ValueError(f"this process has no table {name!r}") from None

    @classmethod
    def get_or_create(cls, name: str, columns: Sequence[str], *_: Any) -> ExternalTable:
        """Returns the table of this name, which is created if it does not exist."""
        table = cls._tables.get(name)
        return cls(name, columns) if table is None else table

    @classmethod
    def drop(cls, name: str) -> None:
        """Drops a table: the process writes no more rows to it. Rows that the daemon has read stay."""
        with cls._guard:
            table = cls._tables.pop(name, None)
            if table is not None:
                table._close()

    def names(self) -> list[str]:
        """Returns the names of the columns."""
        return list(self._names)

    def append(self, values: Sequence[Any]) -> None:
        """Writes a row, with a value for each column."""
        self.append_ts(NO_INTEGER, values)

    def append_many(self, rows: Iterable[Sequence[Any]]) -> None:
        """Writes rows, as ``append`` does."""
        for values in rows:
            self.append_ts(NO_INTEGER, values)

    def append_ts(self, t: int, values: Sequence[Any]) -> None:
        """Writes a row whose column ``timestamp`` is ``t``, µs since 1970; NO_INTEGER means now."""
        ring, number = self._ring, 0
        if ring is not None:
            number = next(ring.numbers)
            if ring.texts:
                values = [v.encode(errors="replace") if v.__class__ is str else v for v in values]
            try:
                ring.put(number, t, values)
                return
            except (struct.error, TypeError, ValueError):
                pass
        self._append_slowly(t, values, ring, number)

    def take(self, limit: int | None = None) -> list[tuple[int, list[Any]]]:
        """Returns the newest rows that are still in memory, oldest first, as (time in µs since 1970, values)."""
        since_boot_ns = time.time_ns() - time.monotonic_ns()
        rows = []
        for ring in self._rings():
            kinds = [kind for _, kind, _ in ring.columns]
            for _, (mono_ns, t, *values) in ring.rows():
                shown = [_shown(kind, value) for kind, value in zip(kinds, values)]
                rows.append(((mono_ns + since_boot_ns) // 1000 if t == NO_INTEGER else t, shown))
        return rows if limit is None else rows[max(len(rows) - limit, 0) :]

    def _append_slowly(self, t: int, values: Sequence[Any], before: _Ring | None, number: int) -> None:
        """Writes the first row, a row with None, and a row that needs other types of columns.

        ``number``: the number of the row in the ring ``before``.
        """
        try:
            values = list(values)
            if len(values) != len(self._names):
                raise ValueError(f"{len(values)} values for {len(self._names)} columns")
            with self._guard:
                ring = self._ring = self._ring_for(values)
            packed = [_packed(kind, value) for (_, kind, _), value in zip(ring.columns, values)]
            if ring is not before:
                number = next(ring.numbers)
            ring.put(number, t, packed)
        except Exception:  # reporting must not end a training job
            self.refused += 1

    def _ring_for(self, values: Sequence[Any]) -> _Ring:
        """Returns the ring if its columns can hold ``values``, else a new ring with wider types."""
        before: Sequence[Column | None] = [None] * len(values) if self._ring is None else self._ring.columns
        columns = [_column(name, *pair) for name, *pair in zip(self._names, before, values)]
        if self._ring is not None and columns == self._ring.columns:
            return self._ring
        new = _Ring(self.name, columns)
        self._older = _kept(self._rings())
        return new

    def _rings(self) -> list[_Ring]:
        return self._older if self._ring is None else [*self._older, self._ring]

    def _close(self) -> None:
        for ring in (*self._replaced, *self._rings()):
            ring.close()
        self._ring = None
        self._older.clear()
        self._replaced.clear()

    @classmethod
    def forked(cls) -> None:
        """Called in a forked child: closes the memory of the parent. The child writes its rows to new memory."""
        cls._guard = threading.Lock()
        for table in cls._tables.values():
            table._close()


def _kept(rings: list[_Ring]) -> list[_Ring]:
    """Returns the newest _MAX_OLDER of ``rings``, and closes all older rings."""
    for ring in rings[:-_MAX_OLDER]:
        ring.close()
    return rings[-_MAX_OLDER:]


def _column(name: str, before: Column | None, value: Any) -> Column:
    """Returns a column that can hold ``value`` and all earlier values of the column."""
    order = ("", "i64", "f64", "text")
    kind = max(_kind(value), before[1] if before else "", key=order.index) or "f64"
    if kind != "text":
        return name, kind, 8
    long = len(_packed(kind, value)) >= SHORT or (before is not None and before[2] == LONG)
    return name, kind, LONG if long else SHORT


def _kind(value: Any) -> str:
    """Returns the type of column that a value needs; "" for None, which any column can hold."""
    if value is None:
        return ""
    if isinstance(value, (str, bytes)):
        return "text"
    for kind, convert in (("i64", operator.index), ("f64", float)):
        try:
            number = convert(value)
        except (TypeError, ValueError):
            continue
        if kind == "f64" or NO_INTEGER < number < -NO_INTEGER:
            return kind
    return "text"


def _packed(kind: str, value: Any) -> Any:
    if value is None:
        return {"i64": NO_INTEGER, "f64": math.nan, "text": NO_TEXT}[kind]
    if kind == "text":
        return value if isinstance(value, bytes) else str(value).encode(errors="replace")
    return operator.index(value) if kind == "i64" else float(value)


def _shown(kind: str, value: Any) -> Any:
    if kind == "text":
        return None if value == NO_TEXT else value.decode(errors="ignore")
    return None if value == NO_INTEGER or value != value else value


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ExternalTable.forked)
    os.register_at_fork(after_in_child=FixedTable.forked)
