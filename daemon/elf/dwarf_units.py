"""Reads units and attributes of hostile DWARF, within bounds.

Format: DWARF 4 and 5, chapters 2 and 7 (7.5.1 for the units, 7.5.3 for the abbreviations, 7.5.6 for the forms); also
the GNU forms of dwz.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from probing.api.errors import CorruptTarget, UnsupportedTarget

__all__ = (
    "INDEXES",
    "LINE_STRP",
    "STRING",
    "STRP",
    "STRX",
    "Abbreviation",
    "Attribute",
    "Damaged",
    "Unit",
    "Units",
    "Value",
    "fixed_size",
    "uleb",
)

# DW_FORM_*
STRING, STRP, _REF_ADDR, STRX, LINE_STRP, _IMPLICIT = 0x08, 0x0E, 0x10, 0x1A, 0x1F, 0x21
INDEXES = {0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4}
"""DW_FORM_strx1 to strx4 -> bytes."""
_UNSIGNED = {0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1}
_REFERENCES = {0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8}
_OTHER_FIXED = {0x19: 0, 0x1C: 4, 0x1E: 16, 0x20: 8, 0x24: 8, 0x29: 1, 0x2A: 2, 0x2B: 3, 0x2C: 4, _IMPLICIT: 0}
_FIXED = _UNSIGNED | _REFERENCES | INDEXES | _OTHER_FIXED
_OFFSETS = frozenset({STRP, _REF_ADDR, 0x17, 0x1D, LINE_STRP, 0x1F20, 0x1F21})
_ULEBS = frozenset({0x0F, 0x15, STRX, 0x1B, 0x22, 0x23, 0x1F01, 0x1F02})
_BLOCKS = {0x03: 2, 0x04: 4, 0x0A: 1}
_ADDR, _SDATA, _REF_UDATA, _EXPRESSIONS = 0x01, 0x0D, 0x15, (0x09, 0x18)
_HEADERS_5 = {1: 0, 2: 12, 3: 0, 4: 8, 5: 8, 6: 12}  # DW_UT_*: the number of bytes after the common header

_MAX_UNITS = 1 << 16
_MAX_ABBREVIATIONS = 1 << 16
_MAX_ATTRIBUTES = 256
_MAX_BLOCK = 256

Value = int | bytes


class Damaged(CorruptTarget):
    """These bytes are damaged, or are no entry; others may be sound. The error does not leave the parser's DWARF
    reader.
    """


class Attribute(NamedTuple):
    """An attribute of an entry. ``name``: DW_AT_*, ``form``: DW_FORM_*, ``implicit``: its value if the form is
    implicit_const.
    """

    name: int
    form: int
    implicit: int


class Abbreviation(NamedTuple):
    """The tag and attributes of entries that begin with ``code``."""

    code: int
    tag: int
    children: bool
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: entries from ``first`` to ``end`` in .debug_info; references in it count from ``start``."""

    start: int
    first: int
    end: int
    version: int
    offset_size: int
    address_size: int
    abbreviations: dict[int, Abbreviation]


class Units:
    """The units in .debug_info and .debug_abbrev, given as bytes. ``deadline`` is on time.monotonic().

    Methods raise Damaged for damaged bytes, UnsupportedTarget when reading takes too long.
    """

    def __init__(self, info: bytes, abbrev: bytes, deadline: float) -> None:
        self.info = info
        self._abbrev = abbrev
        self._deadline = deadline
        self._tables: dict[int, dict[int, Abbreviation]] = {}

    def __iter__(self) -> Iterator[Unit]:
        at = 0
        for _ in range(_MAX_UNITS):
            if at >= len(self.info):
                return
            self.in_time()
            unit = self._unit(at)
            if unit is not None:
                yield unit
            at += _length(self.info, at)[1]
        raise UnsupportedTarget("the debugging information has too many units")

    def in_time(self) -> None:
        """Raises UnsupportedTarget after the deadline."""
        if time.monotonic() > self._deadline:
            raise UnsupportedTarget("the debugging information takes too long to read")

    def value(self, unit: Unit, attribute: Attribute, at: int) -> tuple[Value, int]:
        """Returns (value, end) of an attribute at ``at``.

        A reference is an offset in .debug_info; a block its first 256 bytes; a text of another section its offset.
        """
        form = attribute.form
        size = fixed_size(unit, form)
        if size is not None:
            number = int.from_bytes(self.info[at : at + size], "little")
            if form == _IMPLICIT:
                number = attribute.implicit
            return number + (unit.start if form in _REFERENCES else 0), self._inside(unit, at + size)
        if form in _ULEBS:
            number, after = uleb(self.info, at)
            return number + (unit.start if form == _REF_UDATA else 0), self._inside(unit, after)
        if form == _SDATA:
            number, after = _sleb(self.info, at)
            return number, self._inside(unit, after)
        if form == STRING:
            end = self.info.find(b"\0", at, unit.end)
            return b"", self._inside(unit, end + 1 if end >= 0 else unit.end + 1)
        if form in _BLOCKS:
            start = at + _BLOCKS[form]
            length = int.from_bytes(self.info[at:start], "little")
        elif form in _EXPRESSIONS:
            length, start = uleb(self.info, at)
        else:
            raise Damaged(f"the debugging information has an unknown form {form:#x}")
        return self.info[start : start + min(length, _MAX_BLOCK)], self._inside(unit, start + length)

    def _inside(self, unit: Unit, at: int) -> int:
        if at > unit.end:
            raise Damaged("the debugging information ends too early")
        return at

    def _unit(self, start: int) -> Unit | None:
        """Returns the unit at ``start``; None if its version is unknown."""
        offset_size, length = _length(self.info, start)
        at, end = start + (12 if offset_size == 8 else 4), start + length
        if end > len(self.info) or end - at < 16:
            raise Damaged("the debugging information has a damaged unit")
        (version,) = struct.unpack_from("<H", self.info, at)
        if version == 5:
            kind, address_size = self.info[at + 2], self.info[at + 3]
            table = int.from_bytes(self.info[at + 4 : at + 4 + offset_size], "little")
            first = at + 4 + offset_size + _HEADERS_5.get(kind, 0)
        elif 2 <= version <= 4:
            table = int.from_bytes(self.info[at + 2 : at + 2 + offset_size], "little")
            address_size = self.info[at + 2 + offset_size]
            first = at + 3 + offset_size
        else:
            return None
        return Unit(start, first, end, version, offset_size, address_size, self._table(table))

    def _table(self, offset: int) -> dict[int, Abbreviation]:
        if offset not in self._tables:
            table: dict[int, Abbreviation] = {}
            at = offset
            for _ in range(_MAX_ABBREVIATIONS):
                code, at = uleb(self._abbrev, at)
                if not code:
                    break
                table[code], at = self._abbreviation(code, at)
            else:
                raise UnsupportedTarget("the debugging information has too many abbreviations")
            self._tables[offset] = table
        return self._tables[offset]

    def _abbreviation(self, code: int, at: int) -> tuple[Abbreviation, int]:
        self.in_time()
        tag, at = uleb(self._abbrev, at)
        children, at = uleb(self._abbrev, at)
        attributes: list[Attribute] = []
        while len(attributes) < _MAX_ATTRIBUTES:
            name, at = uleb(self._abbrev, at)
            form, at = uleb(self._abbrev, at)
            implicit = 0
            if form == _IMPLICIT:
                implicit, at = _sleb(self._abbrev, at)
            if not name and not form:
                return Abbreviation(code, tag, bool(children), tuple(attributes)), at
            attributes.append(Attribute(name, form, implicit))
        raise Damaged("the debugging information has too many attributes")


def uleb(data: bytes, at: int) -> tuple[int, int]:
    """Returns the unsigned LEB128 number at ``at``, and its end."""
    number = 0
    for shift in range(0, 70, 7):
        if not 0 <= at < len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise Damaged("the debugging information has a damaged number")


def _sleb(data: bytes, at: int) -> tuple[int, int]:
    number, end = uleb(data, at)
    bits = 7 * (end - at)
    return (number - (1 << bits) if number >> (bits - 1) else number), end


def fixed_size(unit: Unit, form: int) -> int | None:
    """Returns the size of an attribute of ``form`` in bytes; None for a form of variable size."""
    if form == _ADDR or (form == _REF_ADDR and unit.version == 2):
        return unit.address_size
    return unit.offset_size if form in _OFFSETS else _FIXED.get(form)


def _length(info: bytes, at: int) -> tuple[int, int]:
    """Returns the bytes of an offset in the unit at ``at``, and the length of the unit with its length field."""
    if at + 12 > len(info):
        raise Damaged("the debugging information ends too early")
    length = int.from_bytes(info[at : at + 4], "little")
    if length == 0xFFFFFFFF:
        return 8, 12 + int.from_bytes(info[at + 4 : at + 12], "little")
    return 4, 4 + length
