"""Symbols, build id and load addresses of an ELF file, read from a descriptor.

Runs in the parser, which has no rights: every size in the file is the target's word and is checked against the file
and a limit. Tables are read through numpy, so that half a million symbols take some tens of milliseconds.
Format: the System V gABI, chapters 4 and 5.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import UnsupportedTarget

__all__ = ("AARCH64", "X86_64", "Elf", "Segment", "Symbol", "SymbolFinder", "find_symbols", "read_symbol")

X86_64, AARCH64 = 62, 183
_ET_EXEC, _ET_DYN = 2, 3
_PT_LOAD, _PT_NOTE = 1, 4
_SHT_SYMTAB, _SHT_NOBITS, _SHT_DYNSYM = 2, 8, 11
_SHF_COMPRESSED, _ELFCOMPRESS_ZLIB = 0x800, 1
_COMPRESSION = struct.Struct("<IIQQ")
_NT_GNU_BUILD_ID = 3
_MAX_HEADERS = 4096
# libtorch_cpu has 0.5 million symbols and 60 MB of their names.
_MAX_STRINGS = 256 << 20
_MAX_SYMBOLS = 2 << 20
_MAX_NOTES = 1 << 16
_MAX_SECTION_NAMES = 1 << 20
_MAX_NAME = 1024
# Places where a name is found and symbols that are compared with it, all patterns of a search together.
_MAX_COMPARED = 1 << 16
_MAX_MATCHES = 512
_HEAD = 32
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)

# The fixed parts of a pattern, in order; one part is a whole name.
_Parts = list[bytes]


class Segment(NamedTuple):
    """A PT_LOAD: where a part of the file lies in memory. ``flags``: 1 executable, 2 writable, 4 readable."""

    vaddr: int
    offset: int
    file_size: int
    memory_size: int
    flags: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A defined symbol. ``address`` is before relocation; ``head`` its first bytes in the file, at most 32.

    ``file_offset`` is None where no segment holds it in the file (.bss).
    """

    name: str
    address: int
    file_offset: int | None
    size: int
    head: bytes


# The symbols of the file at a descriptor whose names match patterns, as ``find_symbols``.
SymbolFinder = Callable[[int, Sequence[str]], Sequence[Symbol]]


class Elf:
    """The file at ``fd``, which stays the caller's. Raises UnsupportedTarget for what is no 64-bit ELF of our order."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._length = os.fstat(fd).st_size
        head = self._read(0, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise UnsupportedTarget("not a 64-bit little-endian ELF file")
        kind, self.machine, _, _, programs, sections = struct.unpack_from("<HHIQQQ", head, 16)
        program_size, program_count, section_size, section_count, self._names = struct.unpack_from("<HHHHH", head, 54)
        if kind not in (_ET_EXEC, _ET_DYN):
            raise UnsupportedTarget(f"an ELF file of type {kind} is not mapped to be run")
        self.relocated = kind == _ET_DYN
        """False: it is loaded at the very addresses of its symbols."""
        headers = self._table(programs, program_size, program_count, "<IIQQQQQQ")
        self.segments = tuple(
            Segment(vaddr, offset, file_size, memory_size, flags)
            for kind, flags, offset, vaddr, _, file_size, memory_size, _ in headers
            if kind == _PT_LOAD
        )
        self._notes = [(offset, size) for kind, _, offset, _, _, size, _, _ in headers if kind == _PT_NOTE]
        self._sections = self._table(sections, section_size, section_count, "<IIQQQQIIQQ")

    @property
    def first_vaddr(self) -> int:
        """Load bias = start of the mapping of the first segment - (this cut to its page)."""
        if not self.segments:
            raise UnsupportedTarget("the ELF file has nothing to load")
        return self.segments[0].vaddr

    def build_id(self) -> bytes | None:
        for offset, size in self._notes:
            notes = self._read(offset, min(size, _MAX_NOTES))
            at = 0
            while at + 12 <= len(notes):
                name_size, data_size, kind = struct.unpack_from("<III", notes, at)
                name = at + 12
                data = name + -(-name_size // 4) * 4
                if kind == _NT_GNU_BUILD_ID and notes[name : name + name_size] == b"GNU\0" and data_size <= 64:
                    return notes[data : data + data_size]
                at = data + -(-data_size // 4) * 4
        return None

    def section(self, name: str, limit: int) -> bytes:
        """What the section ``name`` holds, decompressed; empty where there is none.

        Raises UnsupportedTarget for one of more than ``limit`` bytes, and for another compression than zlib.
        """
        for _, kind, flags, _, offset, size, *_ in self._named(name.encode()):
            if kind == _SHT_NOBITS:
                continue
            if size > limit:
                raise UnsupportedTarget(f"the section {name} of the ELF file is too large")
            data = self._read(offset, size)
            return _decompressed(data, name, limit) if flags & _SHF_COMPRESSED else data
        return b""

    def _named(self, name: bytes) -> Iterator[tuple[Any, ...]]:
        if self._names >= len(self._sections):
            return
        offset, size = self._sections[self._names][4:6]
        names = self._read(offset, min(size, _MAX_SECTION_NAMES))
        for section in self._sections:
            if names.startswith(name + b"\0", section[0]):
                yield section

    def file_offset(self, address: int) -> int | None:
        """Where the byte at ``address`` lies in the file; None where no segment has it there."""
        for segment in self.segments:
            if segment.vaddr <= address < segment.vaddr + segment.file_size:
                return address - segment.vaddr + segment.offset
        return None

    def symbols(self, patterns: Sequence[str]) -> list[Symbol]:
        """Defined symbols whose whole name matches one of ``patterns``, in which ``*`` stands for anything.

        A pattern without a match in .dynsym is looked for in .symtab. By address, aliases all.
        Raises UnsupportedTarget, also for over 512 matches, or 65,536 names to compare.
        """
        found = self._search(_SHT_DYNSYM, {pattern: _parts(pattern) for pattern in patterns})
        absent = {pattern: _parts(pattern) for pattern in patterns if pattern not in found}
        if absent:
            found |= self._search(_SHT_SYMTAB, absent)
        every = {(symbol.address, symbol.name): symbol for symbols in found.values() for symbol in symbols}
        return [symbol for _, symbol in sorted(every.items())]

    def symbol(self, name: str) -> Symbol | None:
        """The symbol of exactly this name; from .symtab where .dynsym has none."""
        for kind in (_SHT_DYNSYM, _SHT_SYMTAB):
            if found := self._search(kind, {name: [name.encode()]}):
                return found[name][0]
        return None

    def _search(self, kind: int, patterns: Mapping[str, _Parts]) -> dict[str, list[Symbol]]:
        """The symbols of each pattern that has any, in the symbol tables of this kind."""
        found: dict[str, list[Symbol]] = {}
        # A file has one table of a kind (gABI chapter 4, "Sections").
        section = next((section for section in self._sections if section[1] == kind), None)
        if section is None:
            return found
        table, strings = self._symbol_table(section)
        order = np.argsort(table["name"])
        names = table["name"][order]
        compared = 0
        for pattern, parts in patterns.items():
            for span in _occurrences(strings, max(parts, key=len)):
                # Of the same type as ``names``: numpy would convert all of them for each look.
                low, high = np.searchsorted(names, np.array(span, names.dtype))
                compared += 1 + int(high - low)
                if compared > _MAX_COMPARED:
                    raise UnsupportedTarget("too many symbols of the ELF file match")
                for row in table[order[low:high]]:
                    if symbol := self._match(row, strings, parts):
                        found.setdefault(pattern, []).append(symbol)
            if sum(map(len, found.values())) > _MAX_MATCHES:
                raise UnsupportedTarget("too many symbols of the ELF file match")
        return found

    def _symbol_table(self, section: tuple[Any, ...]) -> tuple[np.ndarray[Any, Any], bytes]:
        _, _, _, _, offset, size, link, _, _, entry = section
        if link >= len(self._sections) or entry != _SYMBOL.itemsize:
            raise UnsupportedTarget("the ELF file has a damaged symbol table")
        if size // entry > _MAX_SYMBOLS:
            raise UnsupportedTarget("the ELF file has too large a symbol table")
        strings_at, strings_size = self._sections[link][4:6]
        if strings_size > _MAX_STRINGS:
            raise UnsupportedTarget("the ELF file has too large a string table")
        table = np.frombuffer(self._read(offset, size // entry * entry), _SYMBOL)
        return table, self._read(strings_at, strings_size)

    def _match(self, row: Any, strings: bytes, parts: _Parts) -> Symbol | None:
        start = int(row["name"])
        end = strings.find(b"\0", start, start + _MAX_NAME)
        if end < 0 or not row["section"]:
            return None
        raw = strings[start:end]
        if not _matches(raw, parts):
            return None
        address = int(row["value"])
        offset = self.file_offset(address)
        head = os.pread(self._fd, _HEAD, offset) if offset is not None else b""
        return Symbol(raw.decode(errors="replace"), address, offset, int(row["size"]), head)

    def _table(self, offset: int, size: int, count: int, layout: str) -> list[tuple[Any, ...]]:
        need = struct.calcsize(layout)
        if count == 0 or offset == 0:
            return []
        if size < need or count > _MAX_HEADERS:
            raise UnsupportedTarget("the ELF file has damaged headers")
        data = self._read(offset, size * count)
        return [struct.unpack_from(layout, data, i * size) for i in range(count)]

    def _read(self, offset: int, size: int) -> bytes:
        if offset + size > self._length:
            raise UnsupportedTarget("the ELF file ends too early")
        parts = []
        while size:
            part = os.pread(self._fd, min(size, 1 << 30), offset)
            if not part:
                raise UnsupportedTarget("the ELF file shrank while it was read")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def find_symbols(fd: int, patterns: Sequence[str]) -> list[Symbol]:
    """``Elf(fd).symbols(patterns)``."""
    return Elf(fd).symbols(patterns)


def read_symbol(fd: int, name: str) -> Symbol | None:
    """``Elf(fd).symbol(name)``."""
    return Elf(fd).symbol(name)


def _decompressed(data: bytes, name: str, limit: int) -> bytes:
    """gABI chapter 4, "Section Compression"."""
    kind, size = struct.unpack_from("<IxxxxQ", data) if len(data) >= _COMPRESSION.size else (0, 0)
    if kind != _ELFCOMPRESS_ZLIB or size > limit:
        raise UnsupportedTarget(f"the section {name} of the ELF file is compressed in an unknown way, or too large")
    try:
        plain = zlib.decompressobj().decompress(data[_COMPRESSION.size :], size) if size else b""
    except zlib.error as e:
        raise UnsupportedTarget(f"the section {name} of the ELF file is damaged: {e}") from e
    if len(plain) != size:
        raise UnsupportedTarget(f"the section {name} of the ELF file is damaged")
    return plain


def _parts(pattern: str) -> _Parts:
    return [part.encode() for part in pattern.split("*")]


def _matches(name: bytes, parts: _Parts) -> bool:
    """In one pass, whatever the name: a regular expression would go back and forth in a hostile one."""
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


def _occurrences(strings: bytes, needle: bytes) -> Iterator[tuple[int, int]]:
    """The ranges of string offsets at which a name that holds ``needle`` may begin.

    A name may begin inside another's string, since linkers merge equal tails.
    """
    if not needle:
        raise UnsupportedTarget("a symbol pattern without a fixed part")
    at, done = strings.find(needle), -1
    while at >= 0:
        start = max(strings.rfind(b"\0", max(at - _MAX_NAME, 0), at) + 1, done + 1)
        yield start, at + 1
        done = at
        at = strings.find(needle, at + 1)
