"""Reads a BPF ring buffer in bulk: one numpy view shows all waiting records, without a Python step for each event.

Layout (kernel/bpf/ringbuf.c): a consumer page, a producer page, and the data mapped twice, so that nothing wraps. A
record is a header (u32 length with a busy and a discard bit, u32 page offset) and the payload, rounded up to 8 bytes.
The consumer position is in the map. It moves only once the records are safe, so a killed process loses nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import ConfigError, FormatError
from probing.daemon.bpf import syscalls

__all__ = (
    "Drained",
    "Ring",
    "RingMemory",
    "checked_ring_size",
)

BUSY = 1 << 31
DISCARD = 1 << 30
_HEADER = 8


class Drained(NamedTuple):
    """Records of a ring. ``records`` is a copy. ``position`` lies after the last of them: pass it to ``commit`` when
    they are safe.
    """

    records: np.ndarray[Any, Any]
    position: int


@dataclass(slots=True)
class RingMemory:
    """The pages of a ring. ``consumer`` and ``producer`` are arrays of one u64; ``data`` has 2 x ``size`` bytes."""

    consumer: np.ndarray[Any, Any]
    producer: np.ndarray[Any, Any]
    data: Any
    size: int


class Ring:
    """A ring whose records have one dtype. It has one reader, and is not safe for two threads."""

    def __init__(self, name: str, memory: RingMemory, record: np.dtype[Any], fd: int = -1, map_id: int = 0) -> None:
        self.name, self.record, self.map_id = name, record, map_id
        self._memory, self._fd = memory, fd
        slot = _HEADER + -(-record.itemsize // 8) * 8
        names, formats = ["length", "record"], [np.dtype("<u4"), record]
        self._slot = np.dtype({"names": names, "formats": formats, "offsets": [0, _HEADER], "itemsize": slot})

    @classmethod
    def open(cls, name: str, fd: int, record: np.dtype[Any]) -> Ring:
        """Maps the ring buffer with descriptor ``fd``, which the ring then owns, and returns the ring."""
        info = syscalls.map_info(fd)
        page = mmap.PAGESIZE
        consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        shared = mmap.mmap(fd, page + 2 * info.max_entries, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        memory = RingMemory(
            np.frombuffer(consumer, "<u8", 1),
            np.frombuffer(shared, "<u8", 1),
            memoryview(shared)[page:],
            info.max_entries,
        )
        return cls(name, memory, record, fd, info.id)

    def close(self) -> None:
        """Closes the ring; its memory is unmapped when the last array over it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        empty = np.zeros(1, "<u8")
        self._memory = RingMemory(empty, empty, b"", 0)

    def fileno(self) -> int:
        """Returns the descriptor for epoll: readable when records arrived after the last commit."""
        return self._fd

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def position(self) -> int:
        """The committed position, in bytes since the ring was made."""
        return int(self._memory.consumer[0])

    @property
    def end(self) -> int:
        """The position after the last record that was begun."""
        return int(self._memory.producer[0])

    @property
    def backlog(self) -> int:
        """Bytes of records that wait after the committed position."""
        return self.end - self.position

    def records_in(self, size: int) -> int:
        """Returns the number of records that ``size`` bytes of the ring hold, including discarded records."""
        return size // self._slot.itemsize

    def drain(
        self,
        max_bytes: int = 1 << 30,
        until: int | None = None,
        takes: Callable[[np.ndarray[Any, Any]], int] = len,
    ) -> Drained:
        """Returns the finished records after the committed position, up to ``max_bytes`` of ring (at least one record).

        Stops before a record that is still being written, at position ``until``, and after as many records as ``takes``
        returns for them. Until ``commit`` the same records are returned again. Raises FormatError when the ring holds
        records of another size.
        """
        return self._read(self.position, max_bytes, until, takes)

    def peek(self, position: int, max_bytes: int = 1 << 30) -> Drained:
        """Returns finished records like ``drain``, but from ``position`` on, the begin of a record; frees no space.

        For a second reader that sees records before they are drained, also in another thread. Records committed
        meanwhile are left out; a position before the committed one counts as the committed one. Raises FormatError,
        also for a position after the last record.
        """
        while True:
            start = max(position, self.position)
            if start > int(self._memory.producer[0]):
                raise FormatError(f"ring {self.name}: position {position} lies after the last record")
            try:
                drained = self._read(start, max_bytes, None, len)
            except FormatError:
                if self.position <= start:
                    raise
                continue
            # If the position moved meanwhile, the kernel may have overwritten the bytes that were copied: read again.
            if self.position <= start:
                return drained

    def _read(
        self, start: int, max_bytes: int, until: int | None, takes: Callable[[np.ndarray[Any, Any]], int]
    ) -> Drained:
        memory, slot = self._memory, self._slot.itemsize
        end = int(memory.producer[0])
        if until is not None:
            end = min(end, until)
        count = min(end - start, max(max_bytes, slot), memory.size) // slot
        if count <= 0:
            return Drained(np.empty(0, self.record), start)
        view = np.frombuffer(memory.data, self._slot, count, start & (memory.size - 1))
        # The lengths are copied at once, because their flags must not change while they are used.
        lengths = view["length"].copy()
        busy = np.flatnonzero(lengths & BUSY)
        if len(busy):
            count = int(busy[0])
            lengths, view = lengths[:count], view[:count]
        if np.any((lengths & ~np.uint32(DISCARD)) != self.record.itemsize):
            raise FormatError(f"ring {self.name} holds records of another size", hint="run `probingd cleanup`")
        records = view["record"]
        kept = (lengths & DISCARD) == 0
        copied = records.copy() if kept.all() else records[kept]
        if (taken := takes(copied)) < len(copied):
            return Drained(copied[:taken], start + int(np.flatnonzero(kept)[taken]) * slot)
        return Drained(copied, start + count * slot)

    def commit(self, position: int) -> None:
        """Frees the space before ``position``. Raises FormatError for a position that is not in the backlog."""
        self._check(position)
        self._memory.consumer[0] = position

    def reset(self, position: int) -> bool:
        """Moves the consumer position to ``position``, which the log has, after a crash. Returns whether it did.

        A position outside of this ring's backlog belongs to an earlier ring: then nothing changes.
        """
        if not self.position <= position <= int(self._memory.producer[0]):
            return False
        self._memory.consumer[0] = position
        return True

    def _check(self, position: int) -> None:
        if not self.position <= position <= int(self._memory.producer[0]):
            raise FormatError(f"ring {self.name}: position {position} is not between the read and write positions")


def checked_ring_size(key: str, size: int) -> int:
    """Returns ``size``, in bytes. Raises ConfigError if a ring cannot have this size; ``key`` is the setting."""
    if size & (size - 1) or size < mmap.PAGESIZE:
        hint = f"use a power of two, for example {max(1 << size.bit_length(), 1 << 16)}"
        raise ConfigError(f"{key} cannot be {size}", hint=hint)
    return size
