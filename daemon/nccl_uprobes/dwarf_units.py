"""DWARF of a library, as little of it as it takes to find a struct by its name and to walk its members.

A unit's abbreviations say how a struct of a name begins in .debug_info (code, then its attributes in order), so that
the bytes to look for are known: no other entry is taken apart. Everything is the target's word: offsets are checked,
entries and time are counted.
Format: DWARF 4 and 5, chapters 2 and 7 (7.5.4 for the codes, 7.5.6 for the forms); also the GNU forms of dwz.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from probing.api.errors import UnsupportedTarget

__all__ = ("COUNT", "LOCATION", "SIZE", "TYPE", "UPPER_BOUND", "Damaged", "Die", "Dwarf", "Unit", "uleb")

# DW_AT_*
_SIBLING, _NAME, SIZE, UPPER_BOUND, COUNT, LOCATION = 0x01, 0x03, 0x0B, 0x2F, 0x37, 0x38
_DECLARATION, TYPE, _STR_OFFSETS_BASE = 0x3C, 0x49, 0x72
_WANTED = frozenset({_SIBLING, _NAME, SIZE, UPPER_BOUND, COUNT, LOCATION, _DECLARATION, TYPE, _STR_OFFSETS_BASE})
_STRUCTURES = (0x02, 0x13)  # DW_TAG_class_type, DW_TAG_structure_type
# DW_FORM_*
_STRING, _STRP, _REF_ADDR, _STRX, _LINE_STRP, _IMPLICIT = 0x08, 0x0E, 0x10, 0x1A, 0x1F, 0x21
_UNSIGNED = {0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1}
_REFERENCES = {0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8}
_INDEXES = {0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4}
_OTHER_FIXED = {0x19: 0, 0x1C: 4, 0x1E: 16, 0x20: 8, 0x24: 8, 0x29: 1, 0x2A: 2, 0x2B: 3, 0x2C: 4, _IMPLICIT: 0}
_FIXED = _UNSIGNED | _REFERENCES | _INDEXES | _OTHER_FIXED
_OFFSETS = frozenset({_STRP, _REF_ADDR, 0x17, 0x1D, _LINE_STRP, 0x1F20, 0x1F21})
_ULEBS = frozenset({0x0F, 0x15, _STRX, 0x1B, 0x22, 0x23, 0x1F01, 0x1F02})
_BLOCKS = {0x03: 2, 0x04: 4, 0x0A: 1}
_ADDR, _SDATA, _REF_UDATA, _EXPRESSIONS = 0x01, 0x0D, 0x15, (0x09, 0x18)
_HEADERS_5 = {1: 0, 2: 12, 3: 0, 4: 8, 5: 8, 6: 12}  # DW_UT_*: what follows the common header

_MAX_UNITS = 1 << 16
_MAX_ABBREVIATIONS = 1 << 16
_MAX_ATTRIBUTES = 256
_MAX_ENTRIES = 200_000
_MAX_NAME = 256
# Mangled names end as the name of a struct does, and so can lie around it.
_MAX_OCCURRENCES = 1 << 14
_MAX_INDEXES = 64
# Searched between two looks at the clock; a multiple of 4.
_PART = 1 << 22

Value = int | bytes


class Damaged(Exception):
    """What is there makes no sense, or is no entry; what lies elsewhere may still do."""


class _Attribute(NamedTuple):
    name: int
    form: int
    implicit: int


class _Abbreviation(NamedTuple):
    code: int
    tag: int
    children: bool
    attributes: tuple[_Attribute, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Entries from ``first`` to ``end`` in .debug_info; references in it count from ``start``."""

    start: int
    first: int
    end: int
    version: int
    offset_size: int
    address_size: int
    abbreviations: dict[int, _Abbreviation]


@dataclass(frozen=True, slots=True)
class Die:
    """A debugging information entry of ``unit``; its children, if it has any, begin at ``end``.

    ``values``: by DW_AT_*, integers, or the bytes of a block; a reference is an offset in .debug_info.
    """

    unit: Unit
    tag: int
    children: bool
    name: str
    values: dict[int, Value]
    end: int

    def number(self, attribute: int) -> int | None:
        value = self.values.get(attribute)
        return value if isinstance(value, int) else None


class Dwarf:
    """The sections as bytes, empty where there is none. ``deadline`` is on time.monotonic().

    All that reads raises Damaged for what makes no sense, UnsupportedTarget for work that goes on too long.
    """

    def __init__(
        self, info: bytes, abbrev: bytes, strings: bytes, line_strings: bytes, str_offsets: bytes, deadline: float
    ) -> None:
        self._info = info
        self._abbrev = abbrev
        self._strings = strings
        self._line_strings = line_strings
        self._str_offsets = str_offsets
        self._deadline = deadline
        self._entries = 0
        self._tables: dict[int, dict[int, _Abbreviation]] = {}
        self._offsets: dict[tuple[bytes, int], npt.NDArray[np.uint32]] = {}
        # Of the unit that was searched last.
        self._found_in = -1
        self._found: dict[tuple[bytes, int], list[int]] = {}

    def units(self) -> Iterator[Unit]:
        """The compilation units, in order."""
        at = 0
        for _ in range(_MAX_UNITS):
            if at >= len(self._info):
                return
            self._in_time()
            unit = self._unit(at)
            if unit is not None:
                yield unit
            at += _length(self._info, at)[1]
        raise UnsupportedTarget("the debugging information has too many units")

    def structures(self, unit: Unit, name: str) -> Iterator[Die]:
        """The full definitions of a struct or class ``name`` in ``unit``."""
        for abbreviation in unit.abbreviations.values():
            self._in_time()
            names = [i for i, attribute in enumerate(abbreviation.attributes) if attribute.name == _NAME]
            if abbreviation.tag not in _STRUCTURES or not abbreviation.children or not names:
                continue
            before = [_fixed_size(unit, attribute.form) for attribute in abbreviation.attributes[: names[0]]]
            sizes = [size for size in before if size is not None]
            if len(sizes) < len(before):
                continue
            code = _uleb_bytes(abbreviation.code)
            for place in self._names(unit, name, abbreviation.attributes[names[0]].form):
                start = place - sum(sizes) - len(code)
                if start >= unit.first and self._info.startswith(code, start):
                    yield from self._definition(unit, start, name)

    def _definition(self, unit: Unit, at: int, name: str) -> Iterator[Die]:
        try:
            die = self.die(unit, at)
        except Damaged:
            # Only looked like one.
            return
        if die.name == name and SIZE in die.values and not die.values.get(_DECLARATION):
            yield die

    def die(self, unit: Unit, at: int) -> Die:
        """The entry at ``at``, which is not the end of a list."""
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise UnsupportedTarget("the debugging information has too many entries")
        if not unit.first <= at < unit.end:
            raise Damaged("the debugging information leads out of itself")
        self._in_time()
        code, at = uleb(self._info, at)
        abbreviation = unit.abbreviations.get(code)
        if abbreviation is None:
            raise Damaged("the debugging information has an unknown abbreviation")
        values: dict[int, Value] = {}
        name = ""
        for attribute in abbreviation.attributes:
            value, after = self._value(unit, attribute, at)
            if attribute.name == _NAME:
                name = self._text(unit, attribute.form, at)
            elif attribute.name in _WANTED:
                values[attribute.name] = value
            at = after
        return Die(unit, abbreviation.tag, abbreviation.children, name, values, at)

    def children(self, die: Die) -> Iterator[Die]:
        """The entries that belong to ``die`` itself, without theirs."""
        at, depth = die.end, 0
        while die.children:
            if at >= die.unit.end:
                raise Damaged("the debugging information ends too early")
            if self._info[at] == 0:
                if not depth:
                    return
                at, depth = at + 1, depth - 1
                continue
            child = self.die(die.unit, at)
            if not depth:
                yield child
            sibling = child.number(_SIBLING)
            at = child.end
            if child.children:
                if sibling is not None and sibling > child.end:
                    at = sibling
                else:
                    depth += 1

    def _in_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise UnsupportedTarget("the debugging information takes too long to read")

    def _unit(self, start: int) -> Unit | None:
        """None for what is no compilation unit that can be read here."""
        offset_size, length = _length(self._info, start)
        at, end = start + (12 if offset_size == 8 else 4), start + length
        if end > len(self._info) or end - at < 16:
            raise Damaged("the debugging information has a damaged unit")
        (version,) = struct.unpack_from("<H", self._info, at)
        if version == 5:
            kind, address_size = self._info[at + 2], self._info[at + 3]
            table = int.from_bytes(self._info[at + 4 : at + 4 + offset_size], "little")
            first = at + 4 + offset_size + _HEADERS_5.get(kind, 0)
        elif 2 <= version <= 4:
            table = int.from_bytes(self._info[at + 2 : at + 2 + offset_size], "little")
            address_size = self._info[at + 2 + offset_size]
            first = at + 3 + offset_size
        else:
            return None
        return Unit(start, first, end, version, offset_size, address_size, self._table(table))

    def _table(self, offset: int) -> dict[int, _Abbreviation]:
        if offset not in self._tables:
            table: dict[int, _Abbreviation] = {}
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

    def _abbreviation(self, code: int, at: int) -> tuple[_Abbreviation, int]:
        self._in_time()
        tag, at = uleb(self._abbrev, at)
        children, at = uleb(self._abbrev, at)
        attributes: list[_Attribute] = []
        while len(attributes) < _MAX_ATTRIBUTES:
            name, at = uleb(self._abbrev, at)
            form, at = uleb(self._abbrev, at)
            implicit = 0
            if form == _IMPLICIT:
                implicit, at = _sleb(self._abbrev, at)
            if not name and not form:
                return _Abbreviation(code, tag, bool(children), tuple(attributes)), at
            attributes.append(_Attribute(name, form, implicit))
        raise Damaged("the debugging information has too many attributes")

    def _value(self, unit: Unit, attribute: _Attribute, at: int) -> tuple[Value, int]:
        form = attribute.form
        size = _fixed_size(unit, form)
        if size is not None:
            number = int.from_bytes(self._info[at : at + size], "little")
            if form == _IMPLICIT:
                number = attribute.implicit
            return number + (unit.start if form in _REFERENCES else 0), self._inside(unit, at + size)
        if form in _ULEBS:
            number, after = uleb(self._info, at)
            return number + (unit.start if form == _REF_UDATA else 0), self._inside(unit, after)
        if form == _SDATA:
            number, after = _sleb(self._info, at)
            return number, self._inside(unit, after)
        if form == _STRING:
            end = self._info.find(b"\0", at, unit.end)
            return b"", self._inside(unit, end + 1 if end >= 0 else unit.end + 1)
        if form in _BLOCKS:
            start = at + _BLOCKS[form]
            length = int.from_bytes(self._info[at:start], "little")
        elif form in _EXPRESSIONS:
            length, start = uleb(self._info, at)
        else:
            raise Damaged(f"the debugging information has an unknown form {form:#x}")
        return self._info[start : start + min(length, _MAX_NAME)], self._inside(unit, start + length)

    def _inside(self, unit: Unit, at: int) -> int:
        if at > unit.end:
            raise Damaged("the debugging information ends too early")
        return at

    def _text(self, unit: Unit, form: int, at: int) -> str:
        """The text of a name; empty for one that lies in another file."""
        value, _ = self._value(unit, _Attribute(_NAME, form, 0), at)
        if form == _STRING:
            return _c_string(self._info, at)
        if form == _STRP and isinstance(value, int):
            return _c_string(self._strings, value)
        if form == _LINE_STRP and isinstance(value, int):
            return _c_string(self._line_strings, value)
        if (form == _STRX or form in _INDEXES) and isinstance(value, int):
            place = self._str_offsets_base(unit) + value * unit.offset_size
            offset = self._str_offsets[place : place + unit.offset_size]
            return _c_string(self._strings, int.from_bytes(offset, "little"))
        return ""

    def _names(self, unit: Unit, name: str, form: int) -> list[int]:
        """Where in the unit an attribute of ``form`` can say ``name``."""
        text = name.encode() + b"\0"
        if unit.start != self._found_in:
            self._found_in, self._found = unit.start, {}
        if (text, form) not in self._found:
            self._found[text, form] = self._find(unit, text, form)
        return self._found[text, form]

    def _find(self, unit: Unit, text: bytes, form: int) -> list[int]:
        if form == _STRING:
            return _places(self._info, text, unit.first, unit.end)
        if form in (_STRP, _LINE_STRP):
            return self._words(unit.first, unit.end, self._offsets_of(text, form))
        found: list[int] = []
        if form == _STRX or form in _INDEXES:
            for index in self._indexes(unit, text):
                self._in_time()
                if form == _STRX:
                    found += _places(self._info, _uleb_bytes(index), unit.first, unit.end)
                elif index < 1 << 8 * _INDEXES[form]:
                    found += _places(self._info, index.to_bytes(_INDEXES[form], "little"), unit.first, unit.end)
        return found

    def _offsets_of(self, text: bytes, form: int) -> npt.NDArray[np.uint32]:
        """Where the text lies among the texts, also as the end of others: linkers merge them."""
        if (text, form) not in self._offsets:
            texts = self._line_strings if form == _LINE_STRP else self._strings
            self._offsets[text, form] = np.array(_places(texts, text, 0, len(texts)), np.uint32)
        return self._offsets[text, form]

    def _indexes(self, unit: Unit, text: bytes) -> list[int]:
        """The numbers of the text in the unit's part of .debug_str_offsets (DWARF 5, 7.26)."""
        base, size = self._str_offsets_base(unit), unit.offset_size
        header = self._str_offsets[max(base - 4 - size, 0) : max(base - 4, 0)]
        end = min(base - 4 + int.from_bytes(header, "little"), len(self._str_offsets))
        # The low halves are enough: what is found is looked at again.
        words = self._matching(self._str_offsets, base, end, self._offsets_of(text, _STRP))
        return [(word - base) // size for word in words if (word - base) % size == 0][:_MAX_INDEXES]

    def _words(self, start: int, end: int, wanted: npt.NDArray[np.uint32]) -> list[int]:
        """Where words of 32 bits that are ``wanted`` lie from ``start`` to ``end``, aligned or not."""
        found: list[int] = []
        for shift in range(4):
            found += self._matching(self._info, start + shift, end, wanted)
        return sorted(found)[:_MAX_OCCURRENCES]

    def _matching(self, data: bytes, start: int, end: int, wanted: npt.NDArray[np.uint32]) -> list[int]:
        """The same of those a multiple of 4 behind ``start``; ``wanted`` in order."""
        found: list[int] = []
        for at in range(start, end - 3, _PART) if len(wanted) else ():
            self._in_time()
            words = np.frombuffer(data, "<u4", min(_PART, end - at) // 4, at)
            nearest = np.minimum(np.searchsorted(wanted, words), len(wanted) - 1)
            found += (np.flatnonzero(wanted[nearest] == words) * 4 + at).tolist()
            if len(found) > _MAX_OCCURRENCES:
                break
        return found

    def _str_offsets_base(self, unit: Unit) -> int:
        """From the attributes of the unit itself, whose own texts may need it: they are not looked at."""
        code, at = uleb(self._info, unit.first)
        for attribute in unit.abbreviations[code].attributes if code in unit.abbreviations else ():
            value, at = self._value(unit, attribute, at)
            if attribute.name == _STR_OFFSETS_BASE and isinstance(value, int):
                return value
        # DWARF 5, 7.26: past the header of the only table.
        return 16 if unit.offset_size == 8 else 8


def uleb(data: bytes, at: int) -> tuple[int, int]:
    """(the unsigned LEB128 number at ``at``, where it ends)."""
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


def _uleb_bytes(number: int) -> bytes:
    parts = bytearray()
    while True:
        number, low = number >> 7, number & 0x7F
        parts.append(low | (0x80 if number else 0))
        if not number:
            return bytes(parts)


def _fixed_size(unit: Unit, form: int) -> int | None:
    if form == _ADDR or (form == _REF_ADDR and unit.version == 2):
        return unit.address_size
    return unit.offset_size if form in _OFFSETS else _FIXED.get(form)


def _length(info: bytes, at: int) -> tuple[int, int]:
    """(bytes of an offset in the unit at ``at``, length of the unit with the word that says it)."""
    if at + 12 > len(info):
        raise Damaged("the debugging information ends too early")
    length = int.from_bytes(info[at : at + 4], "little")
    if length == 0xFFFFFFFF:
        return 8, 12 + int.from_bytes(info[at + 4 : at + 12], "little")
    return 4, 4 + length


def _places(data: bytes, needle: bytes, start: int, end: int) -> list[int]:
    """Where ``needle`` begins; not all of them where there are too many."""
    found: list[int] = []
    at = data.find(needle, start, end)
    while at >= 0 and len(found) < _MAX_OCCURRENCES:
        found.append(at)
        at = data.find(needle, at + 1, end)
    return found


def _c_string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at, at + _MAX_NAME)
    return data[at:end].decode(errors="replace") if 0 <= at < end else ""
