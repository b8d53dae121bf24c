"""What was read of a target for one walk: exact ranges, and whole pages around frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from probing.daemon.python_stack.memory import PAGE, Memory, Range

__all__ = ("Snapshot", "read_both_ways", "word")

_WORD = struct.Struct("<Q").unpack_from


class Snapshot:
    """Bytes of a target by address. ``load`` reads what is missing in one batch; ``get`` never reads.

    ``used`` are the ranges that were asked for, in order: reading them all at once repeats the walk in one call.
    """

    def __init__(self, memory: Memory) -> None:
        self.used: dict[Range, None] = {}
        self._memory = memory
        self._ranges: dict[Range, bytes | None] = {}
        self._pages: dict[int, bytes | None] = {}

    def load(self, ranges: Iterable[Range]) -> None:
        missing = [r for r in dict.fromkeys(ranges) if self._find(r) is None and r not in self._ranges]
        if missing:
            self.fill(zip(missing, self._memory.read_many(missing), strict=True))

    def fill(self, read: Iterable[tuple[Range, bytes | None]]) -> None:
        """Take what was read already; whole pages also answer for what lies in them."""
        for wanted, data in read:
            if wanted[1] == PAGE and wanted[0] % PAGE == 0:
                self._pages[wanted[0]] = data
            else:
                self._ranges[wanted] = data

    def load_pages(self, ranges: Iterable[Range]) -> None:
        """Like ``load``, but with all of the pages that the ranges lie in: their neighbours are wanted next."""
        pages = {p: None for r in ranges if self._find(r) is None for p in _pages(r)}
        missing = [p for p in pages if p not in self._pages]
        if missing:
            read = self._memory.read_many([(p, PAGE) for p in missing])
            self._pages.update(zip(missing, read, strict=True))

    def get(self, address: int, size: int) -> bytes | None:
        """The bytes at ``address``, or None when they could not be read."""
        wanted = (address, size)
        self.used[wanted] = None
        return self._find(wanted)

    def word(self, address: int) -> int | None:
        """The pointer-sized word at ``address``."""
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


def read_both_ways(memory: Memory, chains: Iterable[list[Range]], others: list[Range]) -> tuple[Snapshot, Snapshot]:
    """Read each chain from its end to its begin and at once back again, and ``others`` once, all in one call.

    The first snapshot holds the way there, the second one the way back and the others.
    """
    there: list[tuple[int, Range]] = []
    back: list[tuple[int, Range]] = []
    wanted: list[Range] = []
    for chain in chains:
        for part, ranges in ((there, reversed(chain)), (back, iter(chain))):
            for one in ranges:
                part.append((len(wanted), one))
                wanted.append(one)
    for one in others:
        back.append((len(wanted), one))
        wanted.append(one)
    read = memory.read_many(wanted) if wanted else []
    first, second = Snapshot(memory), Snapshot(memory)
    first.fill((one, read[i]) for i, one in there)
    second.fill((one, read[i]) for i, one in back)
    return first, second


def word(data: bytes, offset: int) -> int:
    """The little-endian 64-bit word at ``offset``."""
    found: int = _WORD(data, offset)[0]
    return found


def _pages(wanted: Range) -> range:
    address, size = wanted
    return range(address & -PAGE, address + size, PAGE)
