"""Reads the memory of a table that a job fills by ``sdk/rows.py``. All of its content may be hostile.

The memory is a sealed file that cannot shrink. It contains a description and a ring of slots; each slot has the number
of its row before and after the row, so that a slot that is being written is recognized. This module copies slots before
it checks them, writes nothing, and counts the rows that it missed.

The file is read, not mapped: to touch a page that the job never wrote would allocate it, and charge it to this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.api.errors import FormatError
from probing.api.tables.user import JOB_TYPES, MAX_COLUMNS, USER_NAME
from probing.rows import HEAD, HEADER_BYTES, LONG, MAGIC, MEMORY_NAME

__all__ = ("MEMORY_LINK", "RowMemory", "Rows", "Taken")

MEMORY_LINK = f"/memfd:{MEMORY_NAME}"
"""The beginning of the link of such a memory file in /proc/PID/fd."""
_MAX_BYTES = 2 << 20
_MAX_NUMBER = 1 << 53
# The number of rows that a call copies first. It is small, since most calls find few or no rows.
_FIRST = 16
Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a read. ``rows``: new rows, oldest first, with the fields ``mono_ns``, ``time`` and the columns.
    ``lost``: the number of rows that were overwritten before they were read."""

    rows: Rows
    lost: int


class RowMemory:
    """The memory of a table. ``table`` and ``columns`` (types by name) come from the job, and their names are checked.

    The caller still has to close ``fd``. ``position``: the number of the next row. It is None if the memory was never
    read before; rows that were overwritten by then are not counted as lost. Raises FormatError for memory that does not
    contain such a table.
    """

    def __init__(self, fd: int, position: int | None = None) -> None:
        status = os.fstat(fd)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed or not HEADER_BYTES < status.st_size <= _MAX_BYTES:
            raise FormatError(f"the memory of a job's table has {status.st_size} bytes, or is not sealed")
        head = os.pread(fd, HEADER_BYTES, 0)
        magic, slot, count, length = HEAD.unpack_from(head)
        if magic != MAGIC or HEAD.size + length > HEADER_BYTES:
            raise FormatError("the memory of a job's table has no description")
        self.table, self.columns, dtype = _described(head[HEAD.size : HEAD.size + length])
        if dtype.itemsize != slot or not 0 < count <= (status.st_size - HEADER_BYTES) // slot:
            raise FormatError(f"the memory of the job's table {self.table} does not have the size of its rows")
        self._fd, self._slot, self._count = os.dup(fd), dtype, count
        weakref.finalize(self, os.close, self._fd)
        self._new = position is None
        self._next = position or 1
        # The number of a row that was missing at the last call although later rows were written; 0: none.
        self._hole = 0

    @property
    def position(self) -> int:
        """The number of the next row."""
        return self._next

    @property
    def row_bytes(self) -> int:
        """The bytes that a row takes in the memory."""
        return self._slot.itemsize

    def take(self, before_ns: int, most: int) -> Taken:
        """Returns at most ``most`` new rows, which were written before ``before_ns`` (CLOCK_MONOTONIC)."""
        rows, following = self._in_order(before_ns, most)
        if len(rows):
            self._new = False
            self._next += len(rows)
            return Taken(rows, 0)
        # A thread that took a number and ended before it wrote the row leaves that row missing forever. So a row that
        # is missing at two calls in succession is given up.
        ahead = bool((following > self._next).any())
        overwritten = int(following[0]) > self._next
        if not ahead or not (overwritten or self._hole == self._next):
            self._hole = self._next if ahead else 0
            return Taken(rows, 0)
        return self._newest(before_ns, most)

    def _in_order(self, before_ns: int, most: int) -> tuple[Rows, npt.NDArray[np.uint64]]:
        """Returns the rows from the next number on, up to the first missing row, and the numbers in all slots that were
        copied."""
        most = min(most, self._count)
        size = min(_FIRST, most)
        while True:
            numbers = np.arange(self._next, self._next + size, dtype=np.uint64)
            rows = self._slots(self._next % self._count, size)
            good = (rows["number"] == numbers) & (rows["again"] == numbers) & (rows["mono_ns"] < before_ns)
            run = size if good.all() else int(good.argmin())
            if run < size or size == most:
                return rows[:run], rows["number"]
            size = min(4 * size, most)

    def _newest(self, before_ns: int, most: int) -> Taken:
        """Returns the newest complete rows, and counts the rows that are missing before them."""
        rows = self._slots(0, self._count)
        numbers = rows["number"]
        whole = (numbers == rows["again"]) & (numbers >= self._next) & (numbers < _MAX_NUMBER)
        rows = rows[whole & (rows["mono_ns"] < before_ns)]
        rows = rows[np.unique(rows["number"], return_index=True)[1]][-most:]
        if not len(rows):
            return Taken(rows, 0)
        begin, self._next, self._hole = self._next, int(rows["number"][-1]) + 1, 0
        lost = 0 if self._new else self._next - begin - len(rows)
        self._new = False
        return Taken(rows, lost)

    def _slots(self, first: int, count: int) -> Rows:
        """Returns a copy of ``count`` slots from ``first`` on. Slot 0 follows the last slot of the ring."""
        ends = min(count, self._count - first)
        parts = [self._read(first, ends), self._read(0, count - ends)] if count > ends else [self._read(first, ends)]
        return np.concatenate(parts)

    def _read(self, first: int, count: int) -> Rows:
        size = count * self._slot.itemsize
        data = os.pread(self._fd, size, HEADER_BYTES + first * self._slot.itemsize)
        return np.frombuffer(data.ljust(size, b"\0"), self._slot)


def _described(text: bytes) -> tuple[str, dict[str, str], np.dtype[np.void]]:
    """Returns the table, its columns and the layout of a slot. Raises FormatError."""
    try:
        value = json.loads(text)
        table, columns = value["table"], [(str(name), str(kind), int(size)) for name, kind, size in value["columns"]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
        raise FormatError(f"the description of a job's table is malformed: {type(e).__name__}") from None
    names = [name for name, _, _ in columns]
    if not isinstance(table, str) or not all(map(USER_NAME.fullmatch, [table, *names])):
        raise FormatError("the names of a job's table and its columns must consist of a-z, 0-9 and _")
    if not 0 < len(set(names)) == len(names) <= MAX_COLUMNS:
        raise FormatError(
            f"the job's table {table} has {len(names)} columns: none, too many, or two with the same name"
        )
    fields: list[tuple[str, str]] = [("number", "<u8"), ("mono_ns", "<i8"), ("time", "<i8")]
    for name, kind, size in columns:
        if kind not in JOB_TYPES or not (2 <= size <= LONG if kind == "text" else size == 8):
            raise FormatError(f"the job's table {table} has a column of type {kind[:20]!r} with {size} bytes")
        # A text begins with its length; the bytes after the text are zero.
        fields += (
            [(f"{name}:length", "u1"), (f":{name}", f"S{size - 1}")]
            if kind == "text"
            else [(f":{name}", "<i8" if kind == "i64" else "<f8")]
        )
    return table, {name: kind for name, kind, _ in columns}, np.dtype([*fields, ("again", "<u8")])
