"""DWARF that is made to cost time: reading it ends at a limit."""

from __future__ import annotations

import struct
import time

import pytest

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.dwarf_search import Die, Dwarf, Texts
from probing.daemon.elf.dwarf_units import Damaged, Units

NAME, SIZE, LOCATION, TYPE, SIBLING = 0x03, 0x0B, 0x38, 0x49, 0x01
STRUCTURE, MEMBER, UNIT = 0x13, 0x0D, 0x11
DATA4, STRP, REF4, STRING = 0x06, 0x0E, 0x13, 0x08
STRINGS = b"\0ncclComm\0"


def uleb(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def abbreviation(code: int, tag: int, children: bool, *attributes: tuple[int, int]) -> bytes:
    pairs = b"".join(uleb(name) + uleb(form) for name, form in attributes)
    return uleb(code) + uleb(tag) + bytes([children]) + pairs + b"\0\0"


def unit(entries: bytes, table: int = 0) -> bytes:
    return struct.pack("<IHIB", len(entries) + 7, 4, table, 8) + entries


def units(info: bytes, abbrev: bytes, seconds: float = 60.0) -> Units:
    return Units(info, abbrev + b"\0", time.monotonic() + seconds)


def structures(found: Units) -> tuple[Dwarf, list[Die]]:
    dwarf = Dwarf(found, Texts(found, STRINGS, b"", b""))
    return dwarf, [die for unit in found for die in dwarf.structures(unit, "ncclComm")]


STRUCT = abbreviation(2, STRUCTURE, True, (NAME, STRP), (SIZE, DATA4))


def entry(size: int) -> bytes:
    return b"\x02" + struct.pack("<II", 1, size)


def test_it_finds_what_is_there_where_it_is() -> None:
    _, found = structures(units(unit(b"\x02\x02" + entry(64) + b"\0") + unit(entry(8) + b"\0"), STRUCT))
    assert [die.number(SIZE) for die in found] == [64, 8]
    assert {die.name for die in found} == {"ncclComm"}


def test_names_that_are_everywhere_end_at_the_deadline() -> None:
    many = b"".join(abbreviation(code, STRUCTURE, True, (NAME, STRP), (SIZE, DATA4)) for code in range(1, 30_000))
    with pytest.raises(UnsupportedTarget, match="too long"):
        structures(units(unit(struct.pack("<I", 1) * 500_000), many, seconds=0.2))


def test_definitions_without_end_are_counted() -> None:
    dwarf, (first, *_) = structures(units(unit(entry(64) * 300_000), STRUCT))
    with pytest.raises(UnsupportedTarget, match="too many entries"):
        list(dwarf.children(first))


def test_a_struct_that_is_its_own_member_is_left() -> None:
    table = STRUCT + abbreviation(3, MEMBER, False, (TYPE, REF4), (LOCATION, DATA4))
    info = unit(entry(64) + (b"\x03" + struct.pack("<II", 11, 0)) * 1000 + b"\0")
    dwarf, (die,) = structures(units(info, table))
    members = list(dwarf.children(die))
    assert len(members) == 1000
    assert {member.number(TYPE) for member in members} == {11}


def test_siblings_lead_forward_only() -> None:
    nested = abbreviation(3, STRUCTURE, True, (SIBLING, REF4))
    back = unit(entry(64) + b"\x03" + struct.pack("<I", 11) + b"\0\0")
    dwarf, (die,) = structures(units(back, STRUCT + nested))
    assert len(list(dwarf.children(die))) == 1
    beyond = unit(entry(64) + b"\x03" + struct.pack("<I", 1 << 30) + b"\0\0")
    dwarf, (die,) = structures(units(beyond, STRUCT + nested))
    with pytest.raises(Damaged):
        list(dwarf.children(die))


@pytest.mark.parametrize(
    "info",
    [
        b"\x01",
        bytes(40),
        struct.pack("<IHIB", 0xFFFFFFF0, 4, 0, 8) + bytes(40),
        struct.pack("<IQHQB", 0xFFFFFFFF, 1 << 63, 4, 0, 8) + bytes(40),
        unit(bytes(40), table=1 << 31),
    ],
)
def test_units_that_make_no_sense_are_damaged(info: bytes) -> None:
    with pytest.raises(Damaged):
        structures(units(info, b"\x80" * 9))


def test_units_without_end_are_counted() -> None:
    empty = struct.pack("<IHIB", 17, 9, 0, 8) + bytes(10)
    with pytest.raises(UnsupportedTarget, match="too many units"):
        list(units(empty * 70_000, b""))


def test_abbreviations_without_end_are_counted() -> None:
    attributes = [(NAME, STRING)] * 300
    with pytest.raises(Damaged, match="too many attributes"):
        list(units(unit(bytes(40)), abbreviation(1, UNIT, True, *attributes)))
    with pytest.raises(UnsupportedTarget, match="too many abbreviations"):
        list(units(unit(bytes(40)), abbreviation(1, UNIT, True) * 70_000))
