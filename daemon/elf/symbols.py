"""Which function an address of a file belongs to: an index of its symbols by address, made once.

Names are read as they are asked for, so that half a million symbols cost their addresses and no more.
"""

from __future__ import annotations

import re

import numpy as np

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.image import ElfImage, Section

__all__ = ("Functions",)

_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_STT_FUNC, _STT_GNU_IFUNC = 2, 10
_STB_LOCAL, _STB_WEAK = 0, 2
_MAX_SYMBOLS = 8 << 20
_MAX_NAME = 4096
# Symbols that begin before the address and may still reach it: aliases, and functions within functions.
_MAX_STEPS = 16
# jmp rel32 and jcc rel32.
_JUMP = re.compile(rb"(?:\xe9|\x0f[\x80-\x8f])(?=(.{4}))", re.DOTALL)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


class Functions:
    """The functions of ``image``, from .symtab, or from .dynsym of a stripped file. Raises UnsupportedTarget."""

    def __init__(self, image: ElfImage) -> None:
        self._image = image
        table, self._strings = _table(image)
        kinds, bindings = table["info"] & 15, table["info"] >> 4
        wanted = ((kinds == _STT_FUNC) | (kinds == _STT_GNU_IFUNC)) & (table["section"] != 0) & (table["name"] != 0)
        table, bindings = table[wanted], bindings[wanted]
        # Of several at one address the last is taken: a global name rather than a weak and a local one.
        rank = np.select([bindings == _STB_LOCAL, bindings == _STB_WEAK], [0, 1], 2)
        order = np.lexsort((rank, table["value"]))
        self._starts = np.ascontiguousarray(table["value"][order])
        self._sizes = np.ascontiguousarray(table["size"][order])
        self._names = np.ascontiguousarray(table["name"][order])

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, address: int, begin: int | None = None) -> tuple[bytes, int] | None:
        """The name of the function at ``address`` (before relocation) as the file has it, and where it begins.

        ``begin`` is where the function begins for all that else is known: only there a symbol without a size counts.
        """
        if not 0 <= address < 1 << 64:
            return None
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        for at in range(index, max(-1, index - _MAX_STEPS), -1):
            start, size = int(self._starts[at]), int(self._sizes[at])
            # Those of _init and of functions in assembler: what follows them may be without a symbol.
            if address < start + size or (size == 0 and start == begin):
                name = self._name(int(self._names[at]))
                return (name, start) if name else None
        return None

    def origin(self, start: int, code: bytes) -> bytes | None:
        """The name of the function that ``code``, at ``start``, was split off from: the only one that it jumps into.

        Compilers put what is seldom run elsewhere (GCC: NAME.cold), and the symbols of such parts do not survive strip.
        """
        found = None
        for jump in _JUMP.finditer(code):
            target = start + jump.end() + 4 + int.from_bytes(jump[1], "little", signed=True)
            index = int(np.searchsorted(self._starts, np.uint64(target), side="right")) - 1 if target > 0 else -1
            # To the very begin of a function leads a call at the end of another.
            if index < 0 or not 0 < target - int(self._starts[index]) < int(self._sizes[index]):
                continue
            if found is not None and found != index:
                return None
            found = index
        return self._name(int(self._names[found])) or None if found is not None else None

    def _name(self, offset: int) -> bytes:
        if self._strings is None or offset >= self._strings.size:
            return b""
        data = self._image.read_upto(self._strings.offset + offset, min(_MAX_NAME, self._strings.size - offset))
        # Versions of symbols are part of names in .symtab only.
        return data.partition(b"\0")[0].partition(b"@")[0]


def _table(image: ElfImage) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], Section | None]:
    for kind in (_SHT_SYMTAB, _SHT_DYNSYM):
        for section in image.sections:
            if section.type != kind:
                continue
            count = section.size // _SYMBOL.itemsize
            if section.entry != _SYMBOL.itemsize or count > _MAX_SYMBOLS or section.link >= len(image.sections):
                raise UnsupportedTarget("the ELF file has a damaged symbol table")
            table = np.frombuffer(image.read(section.offset, count * _SYMBOL.itemsize), _SYMBOL)
            return table, image.sections[section.link]
    return np.zeros(0, _SYMBOL), None
