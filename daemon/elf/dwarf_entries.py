"""Finds a struct in DWARF by its name, and its members, without walking other entries.

The abbreviations of a unit give the bytes with which a named struct begins in .debug_info (code, then its attributes in
order). These bytes are searched, and no other entry is parsed. The number of parsed entries is bounded.
Format: DWARF 4 and 5, chapters 2 and 7 (7.5.4 for the codes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.dwarf_strings import Texts, uleb_bytes
from probing.daemon.elf.dwarf_units import Damaged, Unit, Units, Value, fixed_size, uleb

__all__ = ("COUNT", "LOCATION", "SIZE", "TYPE", "UPPER_BOUND", "Die", "Dwarf")

# DW_AT_*
_SIBLING, _NAME, SIZE, UPPER_BOUND, COUNT, LOCATION = 0x01, 0x03, 0x0B, 0x2F, 0x37, 0x38
_DECLARATION, TYPE = 0x3C, 0x49
_WANTED = frozenset({_SIBLING, SIZE, UPPER_BOUND, COUNT, LOCATION, _DECLARATION, TYPE})
_STRUCTURES = (0x02, 0x13)  # DW_TAG_class_type, DW_TAG_structure_type
_MAX_ENTRIES = 200_000


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
    """The entries of units. Raises as ``units`` does."""

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
            code = uleb_bytes(abbreviation.code)
            for place in self._texts.places(unit, name, abbreviation.attributes[names[0]].form):
                start = place - sum(sizes) - len(code)
                if start >= unit.first and self._info.startswith(code, start):
                    yield from self._definition(unit, start, name)

    def _definition(self, unit: Unit, at: int, name: str) -> Iterator[Die]:
        try:
            die = self.die(unit, at)
        except Damaged:
            # The bytes matched by chance.
            return
        if die.name == name and SIZE in die.values and not die.values.get(_DECLARATION):
            yield die

    def die(self, unit: Unit, at: int) -> Die:
        """Returns the entry at ``at``, which is not the end of a list."""
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
