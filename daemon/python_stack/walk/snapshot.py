"""The memory of a target that is read for one walk: exact ranges, and whole pages around frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from probing.daemon.processes.memory import PAGE, Memory, Range

__all__ = ("BothWays", "Snapshot", "both_ways", "is_count", "word")

_WORD = struct.Struct("<Q").unpack_from
_IMMORTAL_KEYS = 1 << 63


class Snapshot:
    """Bytes of a target by address. ``load`` reads missing ranges in one batch; ``get`` never reads.

    ``used``: the ranges passed to ``get``, in order. A single call that reads these ranges can repeat the walk.
    """

    def __init__(self, memory: Memory, base: Snapshot | None = None) -> None:
        self.used: dict[Range, None] = {}
        self._memory = memory
        self._ranges: dict[Range, bytes | None] = dict(base._ranges) if base else {}
        self._pages: dict[int, bytes | None] = dict(base._pages) if base else {}

    def load(self, ranges: Iterable[Range]) -> None:
        missing = [r for r in dict.fromkeys(ranges) if self._find(r) is None and r not in self._ranges]
        if missing:
            self.fill(zip(missing, self._memory.read_many(missing), strict=True))

    def fill(self, read: Iterable[tuple[Range, bytes | None]]) -> None:
        """Adds bytes that were already read; whole pages also serve the ranges inside them."""
        for wanted, data in read:
            if wanted[1] == PAGE and wanted[0] % PAGE == 0:
                self._pages[wanted[0]] = data
            else:
                self._ranges[wanted] = data

    def load_pages(self, ranges: Iterable[Range]) -> None:
        """Loads whole pages around the ranges, because the memory next to them is needed next."""
        pages = {p: None for r in ranges if self._find(r) is None for p in _pages(r)}
        missing = [p for p in pages if p not in self._pages]
        if missing:
            read = self._memory.read_many([(p, PAGE) for p in missing])
            self._pages.update(zip(missing, read, strict=True))

    def get(self, address: int, size: int) -> bytes | None:
        """Returns the bytes at ``address``, or None if they could not be read."""
        wanted = (address, size)
        self.used[wanted] = None
        return self._find(wanted)

    def word(self, address: int) -> int | None:
        """Returns the pointer-sized word at ``address``."""
        data = self.get(address, 8)
        return None if data is None else word(data, 0)

    def _find(self, wanted: Range) -> bytes | None:
        if data := self._ranges.get(wanted):
            return data
        address, size = wanted
        page = address & -PAGE
        first = self._pages.get(page)
        if first is None:
            return None
        end = address - page + size
        if end > PAGE:
            second = self._pages.get(page + PAGE)
            if second is None or end > 2 * PAGE:
                return None
            first += second
        return first[address - page : end]


class BothWays(NamedTuple):
    """The ranges ``wanted`` that one call reads. ``ways``: for each snapshot, the indices of its ranges. ``last``: the
    indices of the second read of the ranges outside of chains.
    """

    wanted: list[Range]
    ways: list[list[int]]
    last: range

    def snapshots(self, memory: Memory, read: Sequence[bytes | None]) -> tuple[list[Snapshot], Snapshot]:
        """Returns the earlier snapshots, and the last snapshot. ``read``: the bytes of each range of ``wanted``.

        The last snapshot has the last read of the chains and the second read of the other ranges. Each earlier snapshot
        has the bytes of its own ranges and all bytes that were read before them.
        """
        before: list[Snapshot] = []
        for way in self.ways:
            # A chain that is read fewer times keeps its earlier bytes.
            snapshot = Snapshot(memory, before[-1] if before else None)
            snapshot.fill((self.wanted[i], read[i]) for i in way)
            before.append(snapshot)
        final = Snapshot(memory, before.pop() if len(before) > 1 else None)
        final.fill((self.wanted[i], read[i]) for i in self.last)
        return before, final


def both_ways(chains: Iterable[tuple[list[Range], int]], others: list[Range]) -> BothWays:
    """Plans a call that reads each chain from its end to its begin and back again. ``others`` are read before and after
    all chains.

    The number that comes with a chain is the number of times that the chain is read both ways.
    """
    wanted: list[Range] = list(others)
    ways: list[list[int]] = [list(range(len(wanted)))]
    for chain, times in chains:
        for number in range(2 * times):
            if number == len(ways):
                ways.append([])
            if number and number % 2 == 0:
                # These reads delay each pass by a different time. Otherwise a thread in a loop could be at the same
                # place in all passes.
                wanted += chain[:1] * (number // 2) ** 2
            ways[number] += range(len(wanted), len(wanted) + len(chain))
            wanted += chain if number % 2 else reversed(chain)
    last = range(len(wanted), len(wanted) + len(others))
    return BothWays([*wanted, *others], ways, last)


def is_count(value: int) -> bool:
    """Returns whether ``value``, the first word of an object, is a reference count. In a freed object this word is a
    pointer or NULL, because CPython's allocator links its free blocks (Objects/obmalloc.c).

    A count uses 32 bits. From 3.14 on the top 16 bits of the word are flags (Include/refcount.h), and the keys of an
    empty dict have the count PY_SSIZE_T_MIN (pycore_dict.h).
    """
    return value == _IMMORTAL_KEYS or (value & 0xFFFF_FFFF != 0 and not value >> 32 & 0xFFFF)


def word(data: bytes, offset: int) -> int:
    """Returns the little-endian 64-bit word at ``offset``."""
    value: int = _WORD(data, offset)[0]
    return value


def _pages(wanted: Range) -> range:
    address, size = wanted
    return range(address & -PAGE, address + size, PAGE)
