"""Call frame information and expressions: what each instruction means, and what hostile ones may cost."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from native_image import CODE, HEADER, SIZE, Function, descriptor, image

from probing.api.errors import CorruptTarget, TargetError, UnsupportedTarget
from probing.daemon.elf.cfi import FrameTable, Row, Rule
from probing.daemon.elf.cfi_programs import evaluate
from probing.daemon.elf.file import PT_GNU_EH_FRAME, Elf
from probing.daemon.elf.functions import Functions

RETURN = Rule("offset", -8)


def row_of(program: bytes, at: int = 50, entry: bytes | None = None) -> Row | None:
    functions = [Function(0x100, 100, program), Function(0x200, 10)]
    with descriptor(image(functions, entry=entry) if entry is not None else image(functions)) as fd:
        return FrameTable(Elf(fd)).row(CODE + 0x100 + at)


@pytest.mark.parametrize("cut", range(9))
def test_an_index_that_ends_within_an_entry_has_the_whole_entries(cut: int) -> None:
    whole = bytearray(image([Function(0x100, 100), Function(0x200, 10)]))
    # The index, whose header has 12 bytes, lies at the end of the file.
    header = struct.pack("<IIQQQQQQ", PT_GNU_EH_FRAME, 4, SIZE, HEADER, HEADER, 28, 28, 4)
    whole[64 + 56 : 64 + 56 + len(header)] = header
    with descriptor(bytes(whole + whole[HEADER : HEADER + 28 - cut])) as fd:
        found = [FrameTable(Elf(fd)).row(CODE + at) for at in (0x110, 0x205)]
    assert found[0] is not None
    assert (found[1] is None) == (cut > 0)


@pytest.mark.parametrize(
    ("program", "cfa", "rules"),
    [
        (b"", (7, 8), {}),
        (b"\x0e\x20", (7, 32), {}),
        (b"\x41\x0e\x10\x86\x02", (7, 16), {6: Rule("offset", -16)}),
        (b"\x0d\x06", (6, 8), {}),
        (b"\x41\x0e\x10\x86\x02\x43\x0d\x06", (6, 16), {6: Rule("offset", -16)}),
        (b"\x83\x03\xc3", (7, 8), {}),
        (b"\x83\x03\x06\x03", (7, 8), {}),
        (b"\x0a\x0e\x40\x83\x03\x0b", (7, 8), {}),
        (b"\x12\x06\x7e", (6, 16), {}),
        (b"\x13\x7d", (7, 24), {}),
        (b"\x05\x0c\x04", (7, 8), {12: Rule("offset", -32)}),
        (b"\x11\x0c\x7f", (7, 8), {12: Rule("offset", 8)}),
        (b"\x14\x0c\x02", (7, 8), {12: Rule("value", -16)}),
        (b"\x15\x0c\x7e", (7, 8), {12: Rule("value", 16)}),
        (b"\x2f\x0c\x02", (7, 8), {12: Rule("offset", 16)}),
        (b"\x09\x03\x0c", (7, 8), {3: Rule("register", 12)}),
        (b"\x07\x03\x08\x06", (7, 8), {3: Rule("undefined"), 6: Rule("same")}),
        (b"\x10\x06\x02\x76\x00", (7, 8), {6: Rule("saved", 0, b"\x76\x00")}),
        (b"\x16\x06\x02\x76\x00", (7, 8), {6: Rule("computed", 0, b"\x76\x00")}),
        (b"\x2e\x10\x00\x00", (7, 8), {}),
        (b"\x02\x33\x0e\x40", (7, 8), {}),  # behind the address
        (b"\x02\x32\x0e\x40", (7, 64), {}),  # at the address
        (b"\x03\x10\x00\x0e\x40", (7, 64), {}),
        (b"\x04\x10\x00\x00\x00\x0e\x40", (7, 64), {}),
    ],
)
def test_instructions(program: bytes, cfa: tuple[int, int], rules: dict[int, Rule]) -> None:
    row = row_of(program)
    assert row is not None
    assert (row.cfa_register, row.cfa_offset) == cfa
    assert row.rules == {16: RETURN, **rules}
    assert (row.start, row.size, row.return_register, row.signal) == (CODE + 0x100, 100, 16, False)


def test_cfa_by_expression() -> None:
    row = row_of(b"\x0f\x02\x77\x08")
    assert row is not None
    assert (row.cfa_register, row.cfa_expression) == (-1, b"\x77\x08")


def test_what_no_function_covers() -> None:
    for at in (-1, 100, 0x200, 1 << 33, -CODE):
        assert row_of(b"", at) is None


def test_signal_frames_say_so() -> None:
    with descriptor(image([Function(0, 16, signal=True)])) as fd:
        row = FrameTable(Elf(fd)).row(CODE)
    assert row is not None
    assert row.signal


@pytest.mark.parametrize(
    "program",
    [
        b"\x0b",  # restores what it never had
        b"\x0a" * 300,  # remembers without end
        b"\x0e" + b"\xff" * 20,  # a number without end
        b"\x0f\x7f\x00",  # an expression behind the end
        b"\x05\xff\x7f\x01",  # a register that is none
        b"\x3d",  # an unknown instruction
        b"\x01" + bytes(8),
        b"\x0e",
    ],
)
def test_instructions_that_make_no_sense(program: bytes) -> None:
    with pytest.raises(TargetError):
        row_of(program)


def test_a_function_without_a_frame() -> None:
    with pytest.raises(CorruptTarget):
        row_of(b"", entry=b"")


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_index_in_another_format(at: int) -> None:
    data = bytearray(image([Function(0, 16)]))
    data[0x1000 + at] ^= 0x47
    with descriptor(bytes(data)) as fd:
        if at == 1:
            assert FrameTable(Elf(fd)) is not None  # where .eh_frame begins is of no use
        else:
            with pytest.raises(UnsupportedTarget):
                FrameTable(Elf(fd))


# The address of a return address below a jump slot, in the middle of a PLT entry or not (GNU ld's .eh_frame for .plt).
PLT = b"\x77\x08\x80\x00\x3f\x1a\x3b\x2a\x33\x24\x22"


def test_the_expression_of_plt_entries() -> None:
    assert evaluate(PLT, {7: 1000, 16: 0x1006}, lambda *_: None) == 1008
    assert evaluate(PLT, {7: 1000, 16: 0x100B}, lambda *_: None) == 1016


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (b"\x08\x05\x09\xff\x22", 4),
        (b"\x0b\xfe\xff\x1f", 2),
        (b"\x11\x7f\x19", 1),
        (b"\x35\x32\x1b", 2),
        (b"\x35\x32\x1d", 1),
        (b"\x31\x32\x33\x14\x22\x22", 7),
        (b"\x35\x36\x16\x1c", 1),
        (b"\x31\x12\x13\x23\x07", 8),
        (b"\x31\x28\x01\x00\x32\x35", 5),
        (b"\x10\x80\x01\x06", 0x1234),
        (b"\x10\x80\x01\x94\x01", 0x34),
        (b"\x09\xff\x38\x26", (1 << 64) - 1),
        (b"\x38\x10\x7f\x24", 0),
        (b"\x76\x08", None),
        (b"\x38\x06", None),
    ],
)
def test_expressions(expression: bytes, value: int | None) -> None:
    def read(address: int, size: int) -> int | None:
        return 0x1234 & (1 << 8 * size) - 1 if address == 0x80 else None

    assert evaluate(expression, {7: 1000}, read) == value


@pytest.mark.parametrize(
    "expression",
    [b"", b"\x2f\xfd\xff", b"\x30\x30\x1b", b"\x22", b"\x15\x09", b"\x2f\x00\x40", b"\xe0", b"\x30" * 100, b"\x96"],
)
def test_expressions_that_make_no_sense(expression: bytes) -> None:
    with pytest.raises(CorruptTarget):
        evaluate(expression, {7: 1000}, lambda *_: None)


@given(st.binary(max_size=64), st.booleans())
def test_any_expression_comes_to_an_end(expression: bytes, readable: bool) -> None:
    try:
        value = evaluate(expression, {6: 1, 7: 1000, 16: 5}, lambda a, _: a if readable else None, 77)
    except CorruptTarget:
        return
    assert value is None or 0 <= value < 1 << 64


@given(st.binary(max_size=200), st.integers(0, 99))
def test_any_program_comes_to_an_end(program: bytes, at: int) -> None:
    try:
        row = row_of(program, at)
    except TargetError:
        return
    assert row is not None


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[int, bytes, int, int]]:
    """A copy of the C library that may be written to, and where its call frame information lies."""
    with open("/proc/self/maps") as maps:
        path = Path(next(line.split()[5] for line in maps if "/libc.so" in line or "/libc-" in line))
    data = path.read_bytes()
    with descriptor(data) as fd:
        header = Elf(fd).segment(PT_GNU_EH_FRAME)
        assert header is not None
        (frames,) = struct.unpack_from("<i", data, header.offset + 4)
        yield fd, data, header.offset, header.vaddr + 4 + frames - header.vaddr + header.offset


@settings(max_examples=examples(60))
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=30), ask=st.integers(0, 5000))
def test_damaged_files_are_refused_or_read(
    real: tuple[int, bytes, int, int], changes: list[tuple[int, int]], ask: int
) -> None:
    fd, data, header, _ = real
    places = []
    try:
        for at, value in changes:
            place = (header + at) if at % 3 else at % 4096  # the index and what follows it, or the ELF header
            if place < len(data):
                places.append(place)
                os.pwrite(fd, bytes([value]), place)
        try:
            table = FrameTable(Elf(fd))
        except TargetError:
            return
        for number in range(20):
            try:
                row = table.row(0x26000 + (ask + number * 7919) * 16 % 0x150000)
            except TargetError:
                continue
            assert row is None or row.start >= 0
    finally:
        for place in places:
            os.pwrite(fd, data[place : place + 1], place)


def test_every_function_of_a_real_library_is_described(real: tuple[int, bytes, int, int]) -> None:
    fd, *_ = real
    elf = Elf(fd)
    table, functions = FrameTable(elf), Functions(elf)
    assert len(functions) > 1000
    found = 0
    for address in range(0x30000, 0x130000, 4096 - 16):
        row = table.row(address)
        if row is None:
            continue
        found += 1
        assert row.start <= address < row.start + row.size
        named = functions.find(address)
        assert named is None or named[1] <= address
    assert found > 200


@given(st.binary(max_size=400))
def test_symbols_of_any_table(data: bytes) -> None:
    whole = bytearray(image([Function(0, 16, name="f")]))
    whole[0x8000 : 0x8000 + len(data)] = data
    whole[0xA000 + 64 + 32 : 0xA000 + 64 + 40] = struct.pack("<Q", len(data))
    with descriptor(bytes(whole)) as fd:
        functions = Functions(Elf(fd))
        for address in (0, CODE, 1 << 40, (1 << 64) - 1):
            found = functions.find(address)
            assert found is None or len(found[0]) <= 4096


def test_the_function_of_an_address() -> None:
    functions = [
        Function(0, 64, name="outer"),
        Function(16, 8, name="inner"),
        Function(100, 20, name="weak", info=0x22),
        Function(100, 20, name="global"),
        Function(100, 20, name="local", info=0x02),
        Function(200, 10, name="version@@V_1", info=0x12),
        Function(300, 10, name="assembler", symbol_size=0),
        Function(400, 10, name="data", info=0x11),
        Function(500, 10, name="end"),
    ]
    with descriptor(image(functions)) as fd:
        found = Functions(Elf(fd))
        expected = {
            0: "outer",
            20: "inner",
            40: "outer",
            70: None,
            110: "global",
            205: "version",
            250: None,
            320: None,
            405: None,
            505: "end",
            520: None,
        }
        assert {at: f[0].decode() if (f := found.find(CODE + at)) else None for at in expected} == expected
        assert found.find(CODE + 320, CODE + 300) == (b"assembler", CODE + 300)
        assert found.find(CODE + 320, CODE + 310) is None


def test_a_part_that_was_split_off() -> None:
    functions = [Function(0, 64, name="whole"), Function(100, 64, name="other")]
    at = CODE + 1000
    with descriptor(image(functions)) as fd:
        found = Functions(Elf(fd))
        for head in (b"\xe9", b"\x0f\x84"):
            into = head + struct.pack("<i", CODE + 10 - at - len(head) - 4)
            assert found.origin(at, into) == b"whole"
            begin = head + struct.pack("<i", CODE - at - len(head) - 4)
            assert found.origin(at, begin) is None
        both = into + b"\xe9" + struct.pack("<i", CODE + 110 - at - len(into) - 5)
        assert found.origin(at, both) is None
        assert found.origin(at, b"\xe9" + struct.pack("<i", -(1 << 31))) is None
