"""The symbol tables of an ELF file as numpy arrays, so that half a million symbols take tens of milliseconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.file import Elf, Section

__all__ = ("SHT_DYNSYM", "SHT_SYMTAB", "SymbolTable", "symbol_table")

SHT_SYMTAB, SHT_DYNSYM = 2, 11
# Elf64_Sym.
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


class SymbolTable(NamedTuple):
    """``rows`` are Elf64_Sym; ``strings`` is the section that holds their names."""

    rows: np.ndarray[tuple[int], np.dtype[Any]]
    strings: Section


def symbol_table(elf: Elf, kind: int, limit: int) -> SymbolTable | None:
    """Returns the table of type ``kind``, of which a file has one at most (gABI chapter 4, "Sections").

    Raises UnsupportedTarget for a damaged table, and for one of more than ``limit`` symbols.
    """
    section = next((section for section in elf.sections if section.type == kind), None)
    if section is None:
        return None
    size = _SYMBOL.itemsize
    if section.link >= len(elf.sections) or section.entry != size:
        raise UnsupportedTarget("the ELF file has a damaged symbol table")
    count = section.size // size
    if count > limit:
        raise UnsupportedTarget("the ELF file has too large a symbol table")
    rows = np.frombuffer(elf.read(section.offset, count * size), _SYMBOL)
    return SymbolTable(rows, elf.sections[section.link])
