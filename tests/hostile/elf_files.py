"""ELF files that are made to cost time: small on disk, large in what they claim to hold."""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ("many_names", "many_symbols", "many_tables")

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ROW = 24
_DYNSYM, _STRTAB = 11, 3
_PAGE = 4096
_STRINGS_AT, _ROWS_AT = 2 * _PAGE, 1 << 20


def many_symbols(path: Path, rows: int = 8 << 20, name: str = "ncclAllReduce") -> Path:
    """A sparse file of 12 kB on disk: ``rows`` undefined symbols, all called ``name``."""
    return _write(path, name.encode() + b"\0", rows, tables=1)


def many_names(path: Path, count: int = 1 << 20, name: str = "ncclAllReduce") -> Path:
    """A table of one symbol, beside a table of strings that repeats ``name``."""
    return _write(path, (name.encode() + b"\0") * count, 1, tables=1)


def many_tables(path: Path, tables: int = 4000, rows: int = 1 << 20, name: str = "ncclAllReduce") -> Path:
    """A sparse file whose ``tables`` tables of symbols are all the same one."""
    return _write(path, name.encode() + b"\0", rows, tables)


def _write(path: Path, strings: bytes, rows: int, tables: int) -> Path:
    rows_at = max(_ROWS_AT, _STRINGS_AT + len(strings))
    sections_at = rows_at + rows * _ROW
    sections = [bytes(_SECTION.size), _SECTION.pack(0, _STRTAB, 0, 0, _STRINGS_AT, len(strings), 0, 0, 1, 0)]
    sections += [_SECTION.pack(0, _DYNSYM, 0, 0, rows_at, rows * _ROW, 1, 0, 8, _ROW)] * tables
    magic = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = _HEADER.pack(magic, 3, 62, 1, 0, 0, sections_at, 0, 64, 0, 0, _SECTION.size, len(sections), 0)
    with path.open("wb") as file:
        file.write(header)
        file.seek(_STRINGS_AT)
        file.write(strings)
        file.seek(sections_at)
        file.write(b"".join(sections))
    return path
