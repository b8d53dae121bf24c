"""Finds the function that contains an address of an ELF file, with an index that sorts the file's symbols by address.

A name is read only when it is needed, so the index takes 20 bytes for each symbol.
"""

from __future__ import annotations

import re

import numpy as np

from probing.daemon.elf.file import Elf
from probing.daemon.elf.symbols import SHT_DYNSYM, SHT_SYMTAB, symbol_table

__all__ = ("Functions",)

# ELF64_SYM.
_ROW = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_STT_FUNC, _STT_GNU_IFUNC = 2, 10
_STB_LOCAL, _STB_WEAK = 0, 2
_MAX_SYMBOLS = 8 << 20
_MAX_NAME = 4096
# The maximum number of symbols at or before an address that the search tries, from the nearest symbol on. The nearest
# symbols may not contain the address: aliases and other functions can begin, and end, inside the function.
_MAX_STEPS = 16
# jmp rel32 and jcc rel32.
_JUMP = re.compile(rb"(?:\xe9|\x0f[\x80-\x8f])(?=(.{4}))", re.DOTALL)


class Functions:
    """The functions of ``elf``, from .symtab, or from .dynsym of a stripped file. Raises UnsupportedTarget."""

    def __init__(self, elf: Elf) -> None:
        self._elf = elf
        table = symbol_table(elf, SHT_SYMTAB, _MAX_SYMBOLS) or symbol_table(elf, SHT_DYNSYM, _MAX_SYMBOLS)
        self._strings = table.strings if table else None
        if table is None:
            self._starts = self._sizes = np.zeros(0, np.uint64)
            self._names = np.zeros(0, np.uint32)
            return
        rows = np.frombuffer(table.rows, _ROW)
        kinds, bindings = rows["info"] & 15, rows["info"] >> 4
        functions = ((kinds == _STT_FUNC) | (kinds == _STT_GNU_IFUNC)) & (rows["section"] != 0) & (rows["name"] != 0)
        rows, bindings = rows[functions], bindings[functions]
        # If several symbols have one address, ``find`` uses the last. The order is local, weak, global, so a global
        # symbol wins.
        rank = np.select([bindings == _STB_LOCAL, bindings == _STB_WEAK], [0, 1], 2)
        order = np.lexsort((rank, rows["value"]))
        self._starts = np.ascontiguousarray(rows["value"][order])
        self._sizes = np.ascontiguousarray(rows["size"][order])
        self._names = np.ascontiguousarray(rows["name"][order])

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, address: int, begin: int | None = None) -> tuple[bytes, int] | None:
        """Returns (mangled name, start) of the function at ``address`` (before relocation), or None.

        A symbol without a size counts only if it starts at ``begin``, the start of the function according to the call
        frame information.
        """
        if not 0 <= address < 1 << 64:
            return None
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        for at in range(index, max(-1, index - _MAX_STEPS), -1):
            start, size = int(self._starts[at]), int(self._sizes[at])
            # _init and functions in assembler have no size, and may be followed by code without a symbol.
            if address < start + size or (size == 0 and start == begin):
                name = self._name(int(self._names[at]))
                return (name, start) if name else None
        return None

    def origin(self, start: int, code: bytes) -> bytes | None:
        """Returns the name of the function from which ``code``, at ``start``, was split off: the only function that
        ``code`` jumps into. None if it jumps into no function, or into several.

        Compilers split off the rarely executed code of a function (GCC: NAME.cold), and strip removes the symbols of
        these parts.
        """
        origin = None
        for jump in _JUMP.finditer(code):
            target = start + jump.end() + 4 + int.from_bytes(jump[1], "little", signed=True)
            index = int(np.searchsorted(self._starts, np.uint64(target), side="right")) - 1 if target > 0 else -1
            # A jump to the first byte of a function is a tail call, and does not count.
            if index < 0 or not 0 < target - int(self._starts[index]) < int(self._sizes[index]):
                continue
            if origin is not None and origin != index:
                return None
            origin = index
        return self._name(int(self._names[origin])) or None if origin is not None else None

    def _name(self, offset: int) -> bytes:
        if self._strings is None or offset >= self._strings.size:
            return b""
        data = self._elf.read_upto(self._strings.offset + offset, min(_MAX_NAME, self._strings.size - offset))
        # A name in .symtab may end with @ and the symbol's version.
        return data.partition(b"\0")[0].partition(b"@")[0]
