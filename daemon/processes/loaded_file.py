"""Reads a loaded ELF file from the memory of a process, because the file may be deleted or lack section headers.

Like the dynamic linker, this module finds symbols by PT_DYNAMIC and DT_GNU_HASH, without section headers. Format: the
System V gABI, chapters 4 and 5; for the hash table ``elf/dl-lookup.c`` of glibc 2.36. The target controls this memory,
so every count is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import NotPython
from probing.daemon.processes.memory import PAGE, Range

__all__ = ("Loaded", "Read", "Segment")

Read = Callable[[Sequence[Range]], Sequence[bytes | None]]

_ET_EXEC, _ET_DYN = 2, 3
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFF_FEF5
_HEADER, _PROGRAM_HEADER, _SYMBOL = 64, 56, 24
_MAX_HEADERS = 64
_MAX_DYNAMIC = 256
_MAX_CHAIN = 64
_MAX_BUCKETS = 1 << 24
_WRITABLE = 2


class Segment(NamedTuple):
    """A PT_LOAD segment, with its address in the process."""

    start: int
    size: int
    writable: bool


@dataclass(slots=True)
class Loaded:
    """An ELF file that is mapped in a process. An address in the file plus ``bias`` is the address in the process."""

    first_address: int
    relocated: bool
    bias: int
    segments: list[Segment]
    _tags: dict[int, int] = field(default_factory=dict)

    @classmethod
    def at(cls, read: Read, start: int) -> Loaded:
        """Returns the file loaded at ``start``. Raises NotPython unless the file is a 64-bit little-endian ELF program
        or library.
        """
        head = read([(start, _HEADER)])[0] or b""
        if head[:6] != b"\x7fELF\x02\x01":
            raise NotPython(f"no 64-bit ELF file is loaded at {start:#x}")
        kind, at, size, count = struct.unpack("<16xH14xQ14xHH6x", head)
        if kind not in (_ET_EXEC, _ET_DYN) or size != _PROGRAM_HEADER or not 0 < count <= _MAX_HEADERS or at > PAGE:
            raise NotPython(f"the ELF file loaded at {start:#x} is neither a program nor a library")
        table = read([(start + at, size * count)])[0] or b""
        headers = [h for h in struct.iter_unpack("<IIQQQQQQ", table) if h[0] in (_PT_LOAD, _PT_DYNAMIC)]
        loads = [h for h in headers if h[0] == _PT_LOAD]
        if not loads:
            raise NotPython(f"the ELF file loaded at {start:#x} has no segment to load")
        relocated, first = kind == _ET_DYN, loads[0][3]
        bias = start - (first & -PAGE) if relocated else 0
        made = cls(first, relocated, bias, [Segment(h[3] + bias, h[6], bool(h[1] & _WRITABLE)) for h in loads])
        for h in headers:
            if h[0] == _PT_DYNAMIC:
                made._read_dynamic(read, h[3] + bias, h[6])
        return made

    def symbols(self, read: Read, names: Iterable[str]) -> dict[str, int]:
        """Returns, for the ``names`` that the file exports, the addresses before relocation."""
        if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= self._tags.keys():
            return {}
        table = self._tags[_DT_GNU_HASH]
        head = read([(table, 16)])[0]
        if head is None:
            return {}
        buckets, first, bloom, _ = struct.unpack("<4I", head)
        if not 0 < buckets <= _MAX_BUCKETS or bloom > _MAX_BUCKETS:
            return {}
        at = table + 16 + 8 * bloom
        found = {}
        for name in names:
            value = self._lookup(read, name.encode(), at, buckets, first)
            if value:
                found[name] = value
        return found

    def _lookup(self, read: Read, name: bytes, at: int, buckets: int, first: int) -> int:
        wanted = _gnu_hash(name)
        index = _u32(read([(at + 4 * (wanted % buckets), 4)])[0])
        chains = at + 4 * buckets
        if index < first:
            return 0
        positions = range(index, index + _MAX_CHAIN)
        for i, data in zip(positions, read([(chains + 4 * (i - first), 4) for i in positions]), strict=True):
            value = _u32(data)
            if (value ^ wanted) >> 1 == 0 and (address := self._symbol(read, i, name)):
                return address
            if data is None or value & 1:
                break
        return 0

    def _symbol(self, read: Read, index: int, name: bytes) -> int:
        data = read([(self._tags[_DT_SYMTAB] + index * _SYMBOL, _SYMBOL)])[0]
        if data is None:
            return 0
        text, _, _, section, value, _ = struct.unpack("<IBBHQQ", data)
        there = read([(self._tags[_DT_STRTAB] + text, len(name) + 1)])[0]
        return value if section and there == name + b"\0" else 0

    def _read_dynamic(self, read: Read, at: int, size: int) -> None:
        table = read([(at, min(size // 16, _MAX_DYNAMIC) * 16)])[0] or b""
        for tag, value in struct.iter_unpack("<QQ", table):
            if tag == 0:
                break
            # glibc has changed these values to addresses in the process; musl leaves the addresses in the file.
            self._tags.setdefault(tag, value if value >= self.bias else value + self.bias)


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFF_FFFF
    return value


def _u32(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")
