"""The parts of an ELF file that unwinding takes, read from its descriptor piece by piece.

Runs in the parser. Files are read and never mapped: a file that is cut short meanwhile then is an error, and no signal.
Format: the System V gABI, chapters 4 and 5; PT_GNU_EH_FRAME: Linux Standard Base, 10.5.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget

__all__ = ("ElfImage", "Part", "Section")

_X86_64 = 62
_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_PF_X = 1
_MAX_HEADERS = 4096
_MAX_READ = 512 << 20


class Part(NamedTuple):
    """A run of the file that is mapped: ``flags`` has 1 where it is executable."""

    vaddr: int
    offset: int
    size: int
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


class ElfImage:
    """The file at ``fd``, which stays the caller's. Raises UnsupportedTarget for what is no x86-64 ELF file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._length = os.fstat(fd).st_size
        head = self.read(0, 64)
        if head[:6] != b"\x7fELF\x02\x01" or int.from_bytes(head[18:20], "little") != _X86_64:
            raise UnsupportedTarget("not an ELF file for x86-64")
        programs, sections = struct.unpack_from("<QQ", head, 32)
        program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", head, 54)
        headers = self._table(programs, program_size, program_count, "<IIQQQQQQ")
        loads = (h for h in headers if h[0] == _PT_LOAD)
        self.parts = tuple(Part(vaddr, offset, size, flags) for _, flags, offset, vaddr, _, size, _, _ in loads)
        frames = [Part(h[3], h[2], h[5], h[1]) for h in headers if h[0] == _PT_GNU_EH_FRAME]
        self.eh_frame_hdr = frames[0] if frames else None
        self.sections = tuple(Section(*s) for s in self._table(sections, section_size, section_count, "<IIQQQQIIQQ"))

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on. Raises UnsupportedTarget when the file has not so many."""
        if offset < 0 or size < 0 or size > _MAX_READ or offset + size > self._length:
            raise UnsupportedTarget("the ELF file ends too early")
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as e:
            raise UnsupportedTarget(f"the ELF file cannot be read: {e.strerror}") from e
        if len(data) != size:
            raise UnsupportedTarget("the ELF file shrank while it was read")
        return data

    def read_upto(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes from ``offset`` on, fewer at the end of the file."""
        return self.read(offset, max(0, min(size, self._length - offset)))

    def offset_of(self, vaddr: int) -> int | None:
        """Where the byte of that address before relocation lies in the file."""
        for part in self.parts:
            if part.vaddr <= vaddr < part.vaddr + part.size:
                return vaddr - part.vaddr + part.offset
        return None

    def code_address(self, offset: int) -> int | None:
        """The address before relocation of the instruction at ``offset`` in the file."""
        for part in self.parts:
            if part.flags & _PF_X and part.offset <= offset < part.offset + part.size:
                return offset - part.offset + part.vaddr
        return None

    def _table(self, offset: int, size: int, count: int, layout: str) -> list[tuple[int, ...]]:
        need = struct.calcsize(layout)
        if count == 0 or offset == 0:
            return []
        if size < need or count > _MAX_HEADERS:
            raise UnsupportedTarget("the ELF file has damaged headers")
        data = self.read(offset, size * count)
        return [struct.unpack_from(layout, data, i * size) for i in range(count)]
