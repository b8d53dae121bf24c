"""The symbol tables of an ELF file, as their bytes: half a million symbols are no objects of Python."""

from __future__ import annotations

import struct
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.file import Elf, Section

__all__ = ("ELF64_SYM", "SHT_DYNSYM", "SHT_SYMTAB", "SymbolTable", "symbol_table")

SHT_SYMTAB, SHT_DYNSYM = 2, 11
# st_name, st_info, st_other, st_shndx, st_value, st_size (gABI chapter 4, "Symbol Table").
ELF64_SYM = struct.Struct("<IBBHQQ")


class SymbolTable(NamedTuple):
    """``rows`` are whole ELF64_SYM; ``strings`` is the section that holds their names."""

    rows: bytes
    strings: Section


def symbol_table(elf: Elf, kind: int, limit: int) -> SymbolTable | None:
    """Returns the table of type ``kind``, of which a file has one at most (gABI chapter 4, "Sections").

    Raises UnsupportedTarget for a damaged table, and for one of more than ``limit`` symbols.
    """
    section = next((section for section in elf.sections if section.type == kind), None)
    if section is None:
        return None
    if section.link >= len(elf.sections) or section.entry != ELF64_SYM.size:
        raise UnsupportedTarget("the ELF file has a damaged symbol table")
    count = section.size // ELF64_SYM.size
    if count > limit:
        raise UnsupportedTarget("the ELF file has too large a symbol table")
    return SymbolTable(elf.read(section.offset, count * ELF64_SYM.size), elf.sections[section.link])
