"""Decodes line tables: from an instruction to its source line.

Three formats: ``lnotab`` (up to 3.9, CPython ``Objects/lnotab_notes.txt`` of 3.9), ``ranges`` (3.10, PEP 626) and
``locations`` (3.11+, ``Objects/locations.md``, later ``InternalDocs/code_objects.md``). A target's
table may hold anything: every loop moves forward through its bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

__all__ = ("line_of",)

_CACHED_TABLE = 4096


def line_of(kind: Literal["lnotab", "ranges", "locations"], table: bytes, first_line: int, offset: int) -> int | None:
    """The source line of the instruction at byte ``offset`` of its code, or None when it has none.

    An ``offset`` below 0 means that the frame has not begun: its line is ``first_line``.
    """
    if offset < 0:
        return first_line
    # Long tables are decoded each time: the cache must stay small whatever a target holds.
    line = _cached(kind, table, offset) if len(table) <= _CACHED_TABLE else _decode(kind, table, offset)
    if line is None:
        return None
    line += first_line
    return line if 0 <= line < 1 << 31 else None


def _decode(kind: str, table: bytes, offset: int) -> int | None:
    if kind == "locations":
        return _locations(table, offset)
    return _ranges(table, offset) if kind == "ranges" else _lnotab(table, offset)


_cached = lru_cache(maxsize=2048)(_decode)


def _lnotab(table: bytes, offset: int) -> int:
    address = line = 0
    for i in range(0, len(table) - 1, 2):
        address += table[i]
        if address > offset:
            break
        line += _signed(table[i + 1])
    return line


def _ranges(table: bytes, offset: int) -> int | None:
    end = line = 0
    for i in range(0, len(table) - 1, 2):
        end += table[i]
        delta = table[i + 1]
        if delta != 0x80:
            line += _signed(delta)
        if end > offset:
            return None if delta == 0x80 else line
    return None


def _locations(table: bytes, offset: int) -> int | None:
    end = line = at = 0
    size = len(table)
    while at < size:
        head = table[at]
        code = head >> 3 & 15
        end += 2 * ((head & 7) + 1)
        at += 1
        if code in (13, 14):
            line += _signed_varint(table, at)
        elif 10 <= code <= 12:
            line += code - 10
        if end > offset:
            return None if code == 15 else line
        # Only the first byte of an entry has its top bit set.
        while at < size and not table[at] & 0x80:
            at += 1
    return None


def _signed_varint(table: bytes, at: int) -> int:
    value = shift = 0
    # A line difference fits in 32 bits, so in six groups of six.
    for byte in table[at : at + 6]:
        value |= (byte & 0x3F) << shift
        shift += 6
        if not byte & 0x40:
            break
    return -(value >> 1) if value & 1 else value >> 1


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte
