"""What was read of a target for one walk: exact ranges, and whole pages around frames."""

from __future__ import annotations

from collections.abc import Iterable

from probing.daemon.python_stack.memory import PAGE, Memory, Range

__all__ = ("Snapshot", "word")


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
        if not missing:
            return
        for wanted, data in zip(missing, self._memory.read_many(missing), strict=True):
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


def word(data: bytes, offset: int) -> int:
    """The little-endian 64-bit word at ``offset``."""
    return int.from_bytes(data[offset : offset + 8], "little")


def _pages(wanted: Range) -> range:
    address, size = wanted
    return range(address & -PAGE, address + size, PAGE)
