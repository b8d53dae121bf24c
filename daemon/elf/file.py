"""Headers, segments and sections of an ELF file, read piece by piece from a descriptor.

Runs in the parser, which has no rights. Each size in the file is untrusted, and is checked against the file's length
and a limit. The file is never mapped, so a file that is truncated meanwhile causes an error instead of SIGBUS.
Format: the System V gABI, chapters 4 and 5; PT_GNU_EH_FRAME: Linux Standard Base 5.0, 10.5.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from probing.api.errors import UnsupportedTarget

__all__ = ("AARCH64", "PT_GNU_EH_FRAME", "X86_64", "Elf", "Section", "Segment")

X86_64, AARCH64 = 62, 183
_ET_EXEC, _ET_DYN = 2, 3
_PT_LOAD, _PT_NOTE, PT_GNU_EH_FRAME = 1, 4, 0x6474E550
_PF_X = 1
_SHT_NOBITS = 8
_SHF_COMPRESSED, _ELFCOMPRESS_ZLIB = 0x800, 1
_COMPRESSION = struct.Struct("<IxxxxQxxxxxxxx")
_NT_GNU_BUILD_ID = 3
_MAX_HEADERS = 4096
_MAX_READ = 512 << 20
_MAX_NOTES = 1 << 16
_MAX_SECTION_NAMES = 1 << 20
_MAX_BUILD_ID = 64


class Segment(NamedTuple):
    """A part of the file and its place in memory. ``flags``: 1 executable, 2 writable, 4 readable."""

    vaddr: int
    offset: int
    file_size: int
    memory_size: int
    flags: int


class Section(NamedTuple):
    """A section header, as in Elf64_Shdr."""

    name: int
    type: int
    flags: int
    vaddr: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Elf:
    """The ELF file that is open as ``fd``. The caller owns ``fd`` and closes it.

    Raises UnsupportedTarget for anything but a 64-bit little-endian executable or shared library, and for a damaged
    file. Addresses are before relocation.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._length = os.fstat(fd).st_size
        head = self.read(0, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise UnsupportedTarget("the file is not a 64-bit little-endian ELF file")
        kind, self.machine, _, _, programs, sections = struct.unpack_from("<HHIQQQ", head, 16)
        program_size, program_count, section_size, section_count, self._names = struct.unpack_from("<HHHHH", head, 54)
        if kind not in (_ET_EXEC, _ET_DYN):
            raise UnsupportedTarget(f"an ELF file of type {kind} is neither an executable nor a shared library")
        self.relocated = kind == _ET_DYN
        """Whether the file is loaded at addresses other than those of its symbols."""
        headers = self._table(programs, program_size, program_count, "<IIQQQQQQ")
        self._programs = [(h[0], Segment(h[3], h[2], h[5], h[6], h[1])) for h in headers]
        self.segments = tuple(self._of_type(_PT_LOAD))
        self.sections = tuple(Section(*h) for h in self._table(sections, section_size, section_count, "<IIQQQQIIQQ"))

    @property
    def first_vaddr(self) -> int:
        """Returns the address of the first segment. The load bias is the start of the segment's mapping minus this
        address, after the address is rounded down to a page.
        """
        if not self.segments:
            raise UnsupportedTarget("the ELF file has no segment to load")
        return self.segments[0].vaddr

    def segment(self, kind: int) -> Segment | None:
        """Returns the first program header of type ``kind`` (PT_*)."""
        return next(self._of_type(kind), None)

    def build_id(self) -> bytes | None:
        for segment in self._of_type(_PT_NOTE):
            notes = self.read(segment.offset, min(segment.file_size, _MAX_NOTES))
            at = 0
            while at + 12 <= len(notes):
                name_size, data_size, kind = struct.unpack_from("<III", notes, at)
                name = at + 12
                data = name + -(-name_size // 4) * 4
                is_gnu = notes[name : name + name_size] == b"GNU\0"
                if kind == _NT_GNU_BUILD_ID and is_gnu and data_size <= _MAX_BUILD_ID:
                    return notes[data : data + data_size]
                at = data + -(-data_size // 4) * 4
        return None

    def section(self, name: str, limit: int) -> bytes:
        """Returns the decompressed content of the section ``name``; empty if the file lacks it.

        Raises UnsupportedTarget for more than ``limit`` bytes, and for a compression other than zlib.
        """
        for section in self._named(name.encode()):
            if section.type == _SHT_NOBITS:
                continue
            if section.size > limit:
                raise UnsupportedTarget(f"the section {name} of the ELF file is too large")
            data = self.read(section.offset, section.size)
            return _decompressed(data, name, limit) if section.flags & _SHF_COMPRESSED else data
        return b""

    def file_offset(self, address: int) -> int | None:
        """Returns the offset in the file of the byte at ``address``; None if the file does not contain it (.bss)."""
        for segment in self.segments:
            if segment.vaddr <= address < segment.vaddr + segment.file_size:
                return address - segment.vaddr + segment.offset
        return None

    def code_address(self, offset: int) -> int | None:
        """Returns the address of the instruction at file offset ``offset``; None outside of executable segments."""
        for segment in self.segments:
            if segment.flags & _PF_X and segment.offset <= offset < segment.offset + segment.file_size:
                return offset - segment.offset + segment.vaddr
        return None

    def read(self, offset: int, size: int) -> bytes:
        """Returns exactly ``size`` bytes from ``offset`` on. Raises UnsupportedTarget if the file has fewer."""
        if offset < 0 or size < 0 or size > _MAX_READ or offset + size > self._length:
            raise UnsupportedTarget("the ELF file ends too early")
        try:
            data = os.pread(self._fd, size, offset)
            while 0 < len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
                data += more
        except OSError as e:
            raise UnsupportedTarget(f"the ELF file cannot be read: {e.strerror}") from e
        if len(data) != size:
            raise UnsupportedTarget("the ELF file shrank while it was read")
        return data

    def read_upto(self, offset: int, size: int) -> bytes:
        """Returns at most ``size`` bytes from ``offset`` on, fewer at the end of the file."""
        offset = min(offset, self._length)
        return self.read(offset, min(size, self._length - offset))

    def _of_type(self, kind: int) -> Iterator[Segment]:
        return (segment for type_, segment in self._programs if type_ == kind)

    def _named(self, name: bytes) -> Iterator[Section]:
        if self._names >= len(self.sections):
            return
        table = self.sections[self._names]
        names = self.read(table.offset, min(table.size, _MAX_SECTION_NAMES))
        for section in self.sections:
            if names.startswith(name + b"\0", section.name):
                yield section

    def _table(self, offset: int, size: int, count: int, layout: str) -> list[tuple[Any, ...]]:
        need = struct.calcsize(layout)
        if count == 0 or offset == 0:
            return []
        if size < need or count > _MAX_HEADERS:
            raise UnsupportedTarget("the ELF file has damaged headers")
        data = self.read(offset, size * count)
        return [struct.unpack_from(layout, data, i * size) for i in range(count)]


def _decompressed(data: bytes, name: str, limit: int) -> bytes:
    """Returns the decompressed section (gABI chapter 4, "Section Compression")."""
    kind, size = _COMPRESSION.unpack_from(data) if len(data) >= _COMPRESSION.size else (0, 0)
    if kind != _ELFCOMPRESS_ZLIB or size > limit:
        raise UnsupportedTarget(f"the section {name} of the ELF file is compressed in an unknown way, or too large")
    try:
        plain = zlib.decompressobj().decompress(data[_COMPRESSION.size :], size) if size else b""
    except zlib.error as e:
        raise UnsupportedTarget(f"the section {name} of the ELF file is damaged: {e}") from e
    if len(plain) != size:
        raise UnsupportedTarget(f"the section {name} of the ELF file is damaged")
    return plain
