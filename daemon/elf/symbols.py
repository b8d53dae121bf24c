"""Finds the symbols of an ELF file whose names match patterns.

The string table is searched for the longest fixed part of a pattern, and only symbols whose names contain it are
compared: libtorch_cpu has 0.5 million symbols and 60 MB of names. Symbol tables stay bytes, so that half a million
symbols do not become Python objects.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress, count, islice
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.file import Elf, Section

__all__ = (
    "ELF64_SYM",
    "SHT_DYNSYM",
    "SHT_SYMTAB",
    "FileSymbols",
    "Symbol",
    "SymbolFinder",
    "find_symbols",
    "matching_symbols",
    "read_symbol",
    "symbol_table",
)

SHT_SYMTAB, SHT_DYNSYM = 2, 11
# st_name, st_info, st_other, st_shndx, st_value, st_size (gABI chapter 4, "Symbol Table").
ELF64_SYM = struct.Struct("<IBBHQQ")


class _SymbolTable(NamedTuple):
    """A symbol table. ``rows``: the ELF64_SYM structs. ``strings``: the section with the names of the symbols."""

    rows: bytes
    strings: Section


def symbol_table(elf: Elf, kind: int, limit: int) -> _SymbolTable | None:
    """Returns the symbol table of type ``kind``; a file has at most one (gABI chapter 4, "Sections").

    Raises UnsupportedTarget for a damaged table, and for a table of more than ``limit`` symbols.
    """
    section = next((section for section in elf.sections if section.type == kind), None)
    if section is None:
        return None
    if section.link >= len(elf.sections) or section.entry != ELF64_SYM.size:
        raise UnsupportedTarget("the ELF file has a damaged symbol table")
    count = section.size // ELF64_SYM.size
    if count > limit:
        raise UnsupportedTarget("the ELF file has too large a symbol table")
    return _SymbolTable(elf.read(section.offset, count * ELF64_SYM.size), elf.sections[section.link])


_MAX_STRINGS = 256 << 20
_MAX_SYMBOLS = 2 << 20
_MAX_NAME = 1024
# The maximum number of occurrences in the string table plus compared symbols, summed over all patterns of a search.
_MAX_COMPARED = 1 << 16
# The maximum number of offsets in the string table that a search considers as starts of names. For each occurrence of a
# pattern it considers up to _MAX_NAME offsets before the occurrence.
_MAX_STARTS = 1 << 22
_MAX_MATCHES = 512
_TOO_MANY = "too many symbols of the ELF file match"
_HEAD = 32
# The prefix of a nested name, and the length before each of its parts (Itanium C++ ABI, 5.1.3).
_METHOD, _LENGTH = "_ZN", re.compile(r"[1-9]\d{0,3}")

# The fixed parts of a pattern, in order; a pattern with one part is a whole name.
_Parts = list[bytes]
# The fields of an ELF64_SYM struct.
_Row = tuple[int, ...]


class Symbol(NamedTuple):
    """A defined symbol. ``address`` is before relocation. ``head`` is the first bytes of the symbol in the file, at
    most 32.

    ``file_offset`` is None if the file does not contain the bytes of the symbol (.bss).
    """

    name: str
    address: int
    file_offset: int | None
    size: int
    head: bytes


class FileSymbols(NamedTuple):
    """Symbols of one file. ``first_vaddr``: the address of its first loaded segment. ``relocated``: whether the file is
    loaded at addresses other than those of its symbols. ``machine``: e_machine.
    """

    symbols: tuple[Symbol, ...]
    first_vaddr: int
    relocated: bool
    machine: int


# A function like ``find_symbols``.
SymbolFinder = Callable[[int, Sequence[str]], Sequence[Symbol]]


def find_symbols(fd: int, patterns: Sequence[str]) -> list[Symbol]:
    """Returns the symbols of the file with descriptor ``fd`` that match ``patterns``, like ``matching_symbols``."""
    return matching_symbols(Elf(fd), patterns)


def matching_symbols(elf: Elf, patterns: Sequence[str]) -> list[Symbol]:
    """Returns the defined symbols whose whole name matches a pattern, sorted by address, with all aliases.

    ``*`` in a pattern stands for any text. A pattern without a match in .dynsym is looked up in .symtab, unless another
    pattern found a function of the same C++ class or inner namespace in .dynsym, because a class is exported with all
    its methods. Raises UnsupportedTarget for a damaged file, for more than 512 matches, and for more than 65,536 names
    to compare.
    """
    found = _search(elf, SHT_DYNSYM, {pattern: _parts(pattern) for pattern in patterns})
    exported = {_class_of(pattern) for pattern in found} - {""}
    absent = {
        pattern: _parts(pattern) for pattern in patterns if pattern not in found and _class_of(pattern) not in exported
    }
    if absent:
        found |= _search(elf, SHT_SYMTAB, absent)
    every = {(symbol.address, symbol.name): symbol for symbols in found.values() for symbol in symbols}
    return [symbol for _, symbol in sorted(every.items())]


def read_symbol(fd: int, name: str) -> Symbol | None:
    """Returns the symbol of exactly this name in the file with descriptor ``fd``; from .symtab if .dynsym lacks it."""
    elf = Elf(fd)
    for kind in (SHT_DYNSYM, SHT_SYMTAB):
        if found := _search(elf, kind, {name: [name.encode()]}):
            return found[name][0]
    return None


def _search(elf: Elf, kind: int, patterns: Mapping[str, _Parts]) -> dict[str, list[Symbol]]:
    """Returns the symbols by pattern, without patterns that have no symbol."""
    found: dict[str, list[Symbol]] = {}
    table = symbol_table(elf, kind, _MAX_SYMBOLS)
    if table is None:
        return found
    if table.strings.size > _MAX_STRINGS:
        raise UnsupportedTarget("the ELF file has too large a string table")
    strings = elf.read(table.strings.offset, table.strings.size)
    spans = _spans(strings, patterns)
    rows = _rows_by_name(table.rows, list(chain.from_iterable(spans.values())))
    compared = sum(map(len, spans.values()))
    for pattern, parts in patterns.items():
        for span in spans[pattern]:
            near = [row for start in span for row in rows.get(start, ())]
            compared += len(near)
            if compared > _MAX_COMPARED:
                raise UnsupportedTarget(_TOO_MANY)
            for row in near:
                if symbol := _match(elf, row, strings, parts):
                    found.setdefault(pattern, []).append(symbol)
        if sum(map(len, found.values())) > _MAX_MATCHES:
            raise UnsupportedTarget(_TOO_MANY)
    return found


def _spans(strings: bytes, patterns: Mapping[str, _Parts]) -> dict[str, list[range]]:
    """Returns, by pattern, the offsets in the string table at which a matching name may begin."""
    found: dict[str, list[range]] = {}
    left = _MAX_COMPARED
    for pattern, parts in patterns.items():
        found[pattern] = list(islice(_occurrences(strings, max(parts, key=len)), left + 1))
        left -= len(found[pattern])
        if left < 0:
            raise UnsupportedTarget(_TOO_MANY)
    return found


def _rows_by_name(rows: bytes, spans: Sequence[range]) -> dict[int, list[_Row]]:
    """Returns the symbols whose names begin in one of ``spans``, by the offset of the name in the string table."""
    if sum(map(len, spans)) > _MAX_STARTS:
        raise UnsupportedTarget(_TOO_MANY)
    wanted = set(chain.from_iterable(spans))
    found: dict[int, list[_Row]] = {}
    if wanted:
        # Slices and maps are faster than a loop: a library has half a million symbols, of which few are needed.
        names = array("I", rows)[:: ELF64_SYM.size // 4]
        positions = compress(count(0, ELF64_SYM.size), map(wanted.__contains__, names))
        for at in islice(positions, _MAX_COMPARED + 1):
            row = ELF64_SYM.unpack_from(rows, at)
            found.setdefault(row[0], []).append(row)
    return found


def _match(elf: Elf, row: _Row, strings: bytes, parts: _Parts) -> Symbol | None:
    start, _, _, section, address, size = row
    end = strings.find(b"\0", start, start + _MAX_NAME)
    if end < 0 or not section:
        return None
    raw = strings[start:end]
    if not _matches(raw, parts):
        return None
    offset = elf.file_offset(address)
    head = elf.read_upto(offset, _HEAD) if offset is not None else b""
    return Symbol(raw.decode(errors="replace"), address, offset, size, head)


def _class_of(pattern: str) -> str:
    """Returns the mangled class or inner namespace of the function that ``pattern`` names; empty if it has none, or if
    its name contains ``*``.
    """
    starts = [len(_METHOD)] if pattern.startswith(_METHOD) else []
    while starts and (length := _LENGTH.match(pattern, starts[-1])):
        starts.append(length.end() + int(length[0]))
    return pattern[: starts[-2]] if len(starts) > 2 and pattern[starts[-1] :].startswith("E") else ""


def _parts(pattern: str) -> _Parts:
    return [part.encode() for part in pattern.split("*")]


def _matches(name: bytes, parts: _Parts) -> bool:
    """Returns whether the name matches. A regular expression would be a risk: a hostile name could make it backtrack.
    This function makes one pass over the name.
    """
    if len(parts) == 1:
        return name == parts[0]
    at, end = len(parts[0]), len(name) - len(parts[-1])
    if at > end or not name.startswith(parts[0]) or not name.endswith(parts[-1]):
        return False
    for part in parts[1:-1]:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _occurrences(strings: bytes, needle: bytes) -> Iterator[range]:
    """Yields the offsets in the string table at which a name with ``needle`` in it may begin.

    A name may begin inside the string of another name, since linkers merge equal tails.
    """
    if not needle:
        raise UnsupportedTarget("a pattern for symbols has no fixed part")
    at, done = strings.find(needle), -1
    while at >= 0:
        start = max(strings.rfind(b"\0", max(at - _MAX_NAME, 0), at) + 1, done + 1)
        yield range(start, at + 1)
        done = at
        at = strings.find(needle, at + 1)
