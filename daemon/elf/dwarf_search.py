"""Finds structs and texts in DWARF by name, without a walk over the entries in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.dwarf_units import (
    INDEXES,
    LINE_STRP,
    STRING,
    STRP,
    STRX,
    Attribute,
    Damaged,
    Unit,
    Units,
    Value,
    fixed_size,
    uleb,
)

__all__ = ("COUNT", "LOCATION", "SIZE", "TYPE", "UPPER_BOUND", "Die", "Dwarf", "Texts")

_DW_AT_NAME, _STR_OFFSETS_BASE = 0x03, 0x72  # DW_AT_*
_MAX_NAME = 256
# Mangled names may end with the name of a struct, and so contain it.
_MAX_OCCURRENCES = 1 << 14
_MAX_INDEXES = 64
# Bytes searched between two checks of the deadline; a multiple of 4.
_PART = 1 << 22


class Texts:
    """The string sections as bytes, empty for a missing section. Methods raise as those of ``Units`` do."""

    def __init__(self, units: Units, strings: bytes, line_strings: bytes, str_offsets: bytes) -> None:
        self._units = units
        self._info = units.info
        self._strings = strings
        self._line_strings = line_strings
        self._str_offsets = str_offsets
        self._offsets: dict[tuple[bytes, int], npt.NDArray[np.uint32]] = {}
        # The unit that was searched last, by its start.
        self._found_in = -1
        self._found: dict[tuple[bytes, int], list[int]] = {}

    def at(self, unit: Unit, form: int, at: int) -> str:
        """Returns the text of an attribute of ``form`` at ``at``; empty for a text in another file."""
        value, _ = self._units.value(unit, Attribute(_DW_AT_NAME, form, 0), at)
        if form == STRING:
            return _c_string(self._info, at)
        if form == STRP and isinstance(value, int):
            return _c_string(self._strings, value)
        if form == LINE_STRP and isinstance(value, int):
            return _c_string(self._line_strings, value)
        if (form == STRX or form in INDEXES) and isinstance(value, int):
            place = self._str_offsets_base(unit) + value * unit.offset_size
            offset = self._str_offsets[place : place + unit.offset_size]
            return _c_string(self._strings, int.from_bytes(offset, "little"))
        return ""

    def places(self, unit: Unit, name: str, form: int) -> list[int]:
        """Returns offsets in .debug_info where an attribute of ``form`` in ``unit`` may hold ``name``."""
        text = name.encode() + b"\0"
        if unit.start != self._found_in:
            self._found_in, self._found = unit.start, {}
        if (text, form) not in self._found:
            self._found[text, form] = self._find(unit, text, form)
        return self._found[text, form]

    def _find(self, unit: Unit, text: bytes, form: int) -> list[int]:
        if form == STRING:
            return _places(self._info, text, unit.first, unit.end)
        if form in (STRP, LINE_STRP):
            return self._words(unit.first, unit.end, self._offsets_of(text, form))
        found: list[int] = []
        if form == STRX or form in INDEXES:
            for index in self._indexes(unit, text):
                self._units.in_time()
                if form == STRX:
                    found += _places(self._info, _uleb_bytes(index), unit.first, unit.end)
                elif index < 1 << 8 * INDEXES[form]:
                    found += _places(self._info, index.to_bytes(INDEXES[form], "little"), unit.first, unit.end)
        return found

    def _offsets_of(self, text: bytes, form: int) -> npt.NDArray[np.uint32]:
        """Returns the offsets of the text. It may be the tail of other texts, since linkers merge equal tails."""
        if (text, form) not in self._offsets:
            texts = self._line_strings if form == LINE_STRP else self._strings
            self._offsets[text, form] = np.array(_places(texts, text, 0, len(texts)), np.uint32)
        return self._offsets[text, form]

    def _indexes(self, unit: Unit, text: bytes) -> list[int]:
        """Returns the indexes of the text in the unit's part of .debug_str_offsets (DWARF 5, 7.26)."""
        base, size = self._str_offsets_base(unit), unit.offset_size
        header = self._str_offsets[max(base - 4 - size, 0) : max(base - 4, 0)]
        end = min(base - 4 + int.from_bytes(header, "little"), len(self._str_offsets))
        # The low 32 bits are enough: each match is verified.
        words = self._matching(self._str_offsets, base, end, self._offsets_of(text, STRP))
        return [(word - base) // size for word in words if (word - base) % size == 0][:_MAX_INDEXES]

    def _words(self, start: int, end: int, wanted: npt.NDArray[np.uint32]) -> list[int]:
        """Returns the offsets from ``start`` to ``end``, aligned or not, at which one of the 32-bit words ``wanted``
        is.
        """
        found: list[int] = []
        for shift in range(4):
            found += self._matching(self._info, start + shift, end, wanted)
        return sorted(found)[:_MAX_OCCURRENCES]

    def _matching(self, data: bytes, start: int, end: int, wanted: npt.NDArray[np.uint32]) -> list[int]:
        """Returns such offsets at multiples of 4 after ``start``; ``wanted`` is sorted."""
        found: list[int] = []
        for at in range(start, end - 3, _PART) if len(wanted) else ():
            self._units.in_time()
            words = np.frombuffer(data, "<u4", min(_PART, end - at) // 4, at)
            nearest = np.minimum(np.searchsorted(wanted, words), len(wanted) - 1)
            found += (np.flatnonzero(wanted[nearest] == words) * 4 + at).tolist()
            if len(found) > _MAX_OCCURRENCES:
                break
        return found

    def _str_offsets_base(self, unit: Unit) -> int:
        """Returns the base from the unit's own attributes, without reading their texts, for which the base may be
        needed.
        """
        code, at = uleb(self._info, unit.first)
        for attribute in unit.abbreviations[code].attributes if code in unit.abbreviations else ():
            value, at = self._units.value(unit, attribute, at)
            if attribute.name == _STR_OFFSETS_BASE and isinstance(value, int):
                return value
        # DWARF 5, 7.26: the base is after the header of the only table.
        return 16 if unit.offset_size == 8 else 8


def _uleb_bytes(number: int) -> bytes:
    """Returns a number as unsigned LEB128."""
    parts = bytearray()
    while True:
        number, low = number >> 7, number & 0x7F
        parts.append(low | (0x80 if number else 0))
        if not number:
            return bytes(parts)


def _places(data: bytes, needle: bytes, start: int, end: int) -> list[int]:
    """Returns the offsets of ``needle`` in ``data``, at most a fixed number of them."""
    found: list[int] = []
    at = data.find(needle, start, end)
    while at >= 0 and len(found) < _MAX_OCCURRENCES:
        found.append(at)
        at = data.find(needle, at + 1, end)
    return found


def _c_string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at, at + _MAX_NAME)
    return data[at:end].decode(errors="replace") if 0 <= at < end else ""


# DW_AT_*
_SIBLING, _NAME, SIZE, UPPER_BOUND, COUNT, LOCATION = 0x01, 0x03, 0x0B, 0x2F, 0x37, 0x38
_DECLARATION, TYPE = 0x3C, 0x49
_WANTED = frozenset({_SIBLING, SIZE, UPPER_BOUND, COUNT, LOCATION, _DECLARATION, TYPE})
_STRUCTURES = (0x02, 0x13)  # DW_TAG_class_type, DW_TAG_structure_type
_MAX_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class Die:
    """A debugging information entry of ``unit``. Its children, if there are any, begin at ``end``.

    ``values``: integers or the bytes of a block, by DW_AT_*; a reference is an offset in .debug_info.
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
    """Reads the entries of units. Methods raise as those of ``Units`` do."""

    def __init__(self, units: Units, texts: Texts) -> None:
        self._units = units
        self._texts = texts
        self._info = units.info
        self._entries = 0

    def structures(self, unit: Unit, name: str) -> Iterator[Die]:
        """Yields the full definitions of a struct or class ``name`` in ``unit``."""
        for abbreviation in unit.abbreviations.values():
            self._units.in_time()
            names = [i for i, attribute in enumerate(abbreviation.attributes) if attribute.name == _NAME]
            if abbreviation.tag not in _STRUCTURES or not abbreviation.children or not names:
                continue
            before = [fixed_size(unit, attribute.form) for attribute in abbreviation.attributes[: names[0]]]
            sizes = [size for size in before if size is not None]
            if len(sizes) < len(before):
                continue
            code = _uleb_bytes(abbreviation.code)
            for place in self._texts.places(unit, name, abbreviation.attributes[names[0]].form):
                start = place - sum(sizes) - len(code)
                if start >= unit.first and self._info.startswith(code, start):
                    yield from self._definition(unit, start, name)

    def _definition(self, unit: Unit, at: int, name: str) -> Iterator[Die]:
        try:
            die = self.die(unit, at)
        except Damaged:
            # The bytes matched by chance: no entry is here.
            return
        if die.name == name and SIZE in die.values and not die.values.get(_DECLARATION):
            yield die

    def die(self, unit: Unit, at: int) -> Die:
        """Returns the entry at ``at``, which must not be the end of a list."""
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise UnsupportedTarget("the debugging information has too many entries")
        if not unit.first <= at < unit.end:
            raise Damaged("the debugging information leads out of itself")
        self._units.in_time()
        code, at = uleb(self._info, at)
        abbreviation = unit.abbreviations.get(code)
        if abbreviation is None:
            raise Damaged("the debugging information has an unknown abbreviation")
        values: dict[int, Value] = {}
        name = ""
        for attribute in abbreviation.attributes:
            value, after = self._units.value(unit, attribute, at)
            if attribute.name == _NAME:
                name = self._texts.at(unit, attribute.form, at)
            elif attribute.name in _WANTED:
                values[attribute.name] = value
            at = after
        return Die(unit, abbreviation.tag, abbreviation.children, name, values, at)

    def children(self, die: Die) -> Iterator[Die]:
        """Yields the direct children of ``die``."""
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
