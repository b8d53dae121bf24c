"""Libraries whose debugging information is made to cost time or memory: cycles, tables without end, bombs of zeros."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

__all__ = (
    "compressed_zeros",
    "siblings_in_a_circle",
    "structs_in_structs",
    "tables_in_tables",
    "types_in_a_circle",
)

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PROGBITS, _STRTAB, _COMPRESSED, _ZLIB = 1, 3, 0x800, 1
_STRUCT, _MEMBER, _TYPEDEF, _UNIT = 0x13, 0x0D, 0x16, 0x11
_SIBLING, _NAME, _SIZE, _LOCATION, _TYPE = 0x01, 0x03, 0x0B, 0x38, 0x49
_STRING, _DATA4, _REF4 = 0x08, 0x06, 0x13
# Bytes of a unit before its first entry.
_FIRST = 11


def _abbreviation(tag: int, children: bool, *attributes: tuple[int, int]) -> bytes:
    return bytes([tag, children, *(part for attribute in attributes for part in attribute), 0, 0])


_ENTRIES = (
    b"".join(
        bytes([code]) + _abbreviation(*entry)
        for code, entry in enumerate(
            (
                (_STRUCT, True, (_NAME, _STRING), (_SIZE, _DATA4)),
                (_MEMBER, False, (_TYPE, _REF4), (_LOCATION, _DATA4)),
                (_TYPEDEF, False, (_TYPE, _REF4)),
                (_UNIT, True),
                (_STRUCT, True, (_SIBLING, _REF4)),
                (_STRUCT, True),
            ),
            1,
        )
    )
    + b"\0"
)


def compressed_zeros(path: Path, size: int = 60 << 20) -> Path:
    """60 kB on disk that are 60 MB of units without a length each, five times."""
    packed = zlib.compress(bytes(size), 9)
    header = struct.pack("<IxxxxQQ", _ZLIB, size, 1)
    names = (".debug_info", ".debug_abbrev", ".debug_str", ".debug_line_str", ".debug_str_offsets")
    return _write(path, dict.fromkeys(names, header + packed), _COMPRESSED)


def tables_in_tables(path: Path, units: int = 50_000, abbreviations: int = 60_000) -> Path:
    """Units that each begin the same table of abbreviations one abbreviation later."""
    one = b"\x81\x80\x01" + _abbreviation(_STRUCT, True, (_NAME, _STRING), (_SIZE, _DATA4))
    entry = b"\x81\x80\x01ncclComm\0" + bytes(4)
    info = b"".join(_unit(entry * 2 + b"\0\0", number * len(one)) for number in range(units))
    return _write(path, {".debug_info": info, ".debug_abbrev": one * abbreviations + b"\0"})


def types_in_a_circle(path: Path, members: int = 20_000) -> Path:
    """A struct ncclComm of unnamed members that are typedefs of each other and the struct itself."""
    struct_at = _FIRST + 1
    members_at = struct_at + 1 + len(b"ncclComm\0") + 4
    typedefs_at = members_at + members * 9 + 1
    entries = b"\x04\x01ncclComm\0" + struct.pack("<I", 4096)
    entries += b"".join(b"\x02" + struct.pack("<II", (struct_at, typedefs_at)[n % 2], 8) for n in range(members))
    entries += b"\0\x03" + struct.pack("<I", typedefs_at + 5) + b"\x03" + struct.pack("<I", typedefs_at) + b"\0"
    return _write(path, {".debug_info": _unit(entries), ".debug_abbrev": _ENTRIES})


def siblings_in_a_circle(path: Path) -> Path:
    """A struct whose sibling is itself."""
    entries = b"\x04\x05" + struct.pack("<I", _FIRST + 1) + b"\0\0"
    return _write(path, {".debug_info": _unit(entries), ".debug_abbrev": _ENTRIES})


def structs_in_structs(path: Path, depth: int = 100_000) -> Path:
    """A struct in a struct in a struct, and so on."""
    entries = b"\x04" + b"\x06" * depth + b"\0" * (depth + 1)
    return _write(path, {".debug_info": _unit(entries), ".debug_abbrev": _ENTRIES})


def _unit(entries: bytes, table: int = 0) -> bytes:
    return struct.pack("<IHIB", len(entries) + 7, 4, table, 8) + entries


def _write(path: Path, sections: Mapping[str, bytes], flags: int = 0) -> Path:
    names = b"\0" + b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    rows, body, at = [bytes(_SECTION.size)], b"", 64
    for name, data in [*sections.items(), (".shstrtab", names)]:
        kind, own = (_PROGBITS, flags) if name in sections else (_STRTAB, 0)
        offset = names.index(name.encode() + b"\0")
        rows.append(_SECTION.pack(offset, kind, own, 0, at + len(body), len(data), 0, 0, 1, 0))
        body += data
    magic = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    counts = (_SECTION.size, len(rows), len(rows) - 1)
    path.write_bytes(_HEADER.pack(magic, 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, *counts) + body + b"".join(rows))
    return path
