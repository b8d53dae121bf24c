"""The environment in memory: pages, bounds, and what a target may put there."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.environment import ALLOWED_NAMES, MAX_VARIABLES, read_environ
from probing.daemon.processes.memory import PAGE, FakeMemory, Range

PROGRAM, LIBC = 0x55_0000_0000, 0x7F00_0000_0000
ARRAY, TEXTS = 0x7F11_0000_0000, 0x7F22_0000_0000
MAPS = b"""\
5500000000-5500001000 r--p 00000000 08:01 11 /usr/bin/python3.11
5500001000-5500002000 r-xp 00001000 08:01 11 /usr/bin/python3.11
7f0000000000-7f0000001000 r--p 00000000 08:01 12 /lib/x86_64-linux-gnu/libc.so.6 (deleted)
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
"""


def elf(symbol: str, value: int) -> bytes:
    """A page with the headers, the hash table and the one symbol of a shared library."""
    name = symbol.encode() + b"\0"
    headers = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, PAGE, PAGE, PAGE)
    headers += struct.pack("<IIQQQQQQ", 2, 6, 512, 512, 512, 64, 64, 8)
    page = bytearray(PAGE)
    page[:64] = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    page[64 : 64 + len(headers)] = headers
    dynamic = struct.pack("<8Q", 5, 1024, 6, 1280, 0x6FFFFEF5, 1536, 0, 0)
    page[512 : 512 + len(dynamic)] = dynamic
    page[1025 : 1025 + len(name)] = name
    page[1304:1328] = struct.pack("<IBBHQQ", 1, 17, 0, 5, value, 8)
    code = 5381
    for byte in symbol.encode():
        code = (code * 33 + byte) & 0xFFFF_FFFF
    table = struct.pack("<4I", 1, 1, 1, 0) + bytes(8) + struct.pack("<2I", 1, code | 1)
    page[1536 : 1536 + len(table)] = table
    return bytes(page)


def segments(*variables: bytes, symbol: str = "__environ", at: int = TEXTS) -> dict[int, bytes]:
    """Memory of a process whose libc has these variables, one behind another from ``at`` on."""
    text, pointers = b"", []
    for variable in variables:
        pointers.append(at + len(text))
        text += variable + b"\0"
    array = struct.pack(f"<{len(pointers) + 1}Q", *pointers, 0)
    made = {
        PROGRAM: elf("other", 64),
        LIBC: elf(symbol, 3 * PAGE),
        LIBC + 3 * PAGE: struct.pack("<Q", ARRAY),
        ARRAY: array.ljust(-(-len(array) // PAGE) * PAGE, b"\0"),
    }
    pages = -(-(at % PAGE + len(text)) // PAGE)
    made[at & -PAGE] = (bytes(at % PAGE) + text).ljust(pages * PAGE, b"\0")
    return made


def read(memory: dict[int, bytes], maps: bytes = MAPS, **more: int) -> dict[str, str] | None:
    return read_environ(FakeMemory(memory, **more), maps, b"/usr/bin/python3.11", ALLOWED_NAMES)


def test_allowed_variables_are_read_and_the_first_of_a_name_counts() -> None:
    assert read(segments(b"PATH=/bin", b"RANK=3", b"SECRET=x", b"WORLD_SIZE=8", b"RANK=4")) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
    }
    assert read(segments()) == {}


def test_the_copy_in_the_program_counts() -> None:
    memory = segments(b"RANK=3")
    memory[PROGRAM] = elf("environ", 2 * PAGE)
    memory[PROGRAM + 2 * PAGE] = struct.pack("<Q", ARRAY)
    memory[LIBC + 3 * PAGE] = struct.pack("<Q", 0)
    assert read(memory) == {"RANK": "3"}


@pytest.mark.parametrize("before_end", range(1, 24))
def test_a_variable_that_crosses_a_page_is_read_as_a_whole(before_end: int) -> None:
    assert read(segments(b"WORLD_SIZE=123456789", at=TEXTS + PAGE - before_end)) == {"WORLD_SIZE": "123456789"}


def test_the_last_variable_of_the_stack_is_read() -> None:
    # Nothing is mapped behind it.
    memory = segments(b"RANK=3", at=TEXTS + PAGE - 7)
    assert read(memory) == {"RANK": "3"}


def test_a_long_value_is_cut_and_without_an_end_as_well() -> None:
    value = (read(segments(b"JOB_NAME=" + b"x" * 3 * PAGE)) or {})["JOB_NAME"]
    assert len(value) == 512
    assert value.endswith("\u2026")
    memory = segments(b"RANK=3")
    memory[TEXTS] = b"JOB_NAME=".ljust(PAGE, b"y")
    assert len((read(memory) or {})["JOB_NAME"]) == 512


def test_of_a_huge_environment_the_first_variables_are_read() -> None:
    many = [b"A%d=" % n for n in range(MAX_VARIABLES)]
    assert read(segments(b"RANK=3", *many, b"WORLD_SIZE=8")) == {"RANK": "3"}


def test_an_array_without_an_end_is_not_followed_for_ever() -> None:
    memory = segments(b"RANK=3")
    memory[ARRAY] = struct.pack("<Q", TEXTS) * (MAX_VARIABLES + 2 * PAGE)
    assert read(memory) == {"RANK": "3"}
    memory[ARRAY] = struct.pack("<Q", TEXTS) * (PAGE // 8)
    assert read(memory) is None


@pytest.mark.parametrize("pointer", [0, 1, 7, ARRAY + 4, 1 << 47, (1 << 64) - 8])
def test_a_pointer_to_nowhere_gives_nothing(pointer: int) -> None:
    memory = segments(b"RANK=3")
    memory[LIBC + 3 * PAGE] = struct.pack("<Q", pointer)
    assert read(memory) is None


def test_unreadable_variables_are_left_out() -> None:
    memory = segments(b"RANK=3", b"WORLD_SIZE=8")
    memory[ARRAY] = struct.pack("<4Q", TEXTS, 1 << 46, TEXTS + 7, 0).ljust(PAGE, b"\0")
    assert read(memory) == {"RANK": "3", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "maps", [b"", b"x", MAPS.replace(b"libc.so.6", b"libm.so.6"), MAPS.replace(b"00000000", b"1000")]
)
def test_without_libc_there_is_no_environment(maps: bytes) -> None:
    assert read(segments(b"RANK=3"), maps) is None
    assert read(segments(b"RANK=3", symbol="stdin")) is None


class Moving(FakeMemory):
    """An environment that another one takes the place of, each time after its variables were read."""

    def __init__(self, memory: dict[int, bytes], changes: int) -> None:
        super().__init__(memory)
        self.changes = changes

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        read = super().read_many(ranges)
        if any(TEXTS <= address < TEXTS + PAGE for address, _ in ranges) and self.changes:
            self.changes -= 1
            self.segments[ARRAY] = struct.pack("<2Q", TEXTS + 8 * (1 + self.changes % 3), 0).ljust(PAGE, b"\0")
        return read


def test_an_environment_that_changes_is_read_again_and_given_up() -> None:
    memory = segments(b"RANK=0\0", b"RANK=1\0", b"RANK=2\0", b"RANK=3\0")
    # Two changes of one look: by its heads and by its texts.
    assert read_environ(Moving(memory, 1), MAPS, b"", ALLOWED_NAMES) == {"RANK": "1"}
    assert read_environ(Moving(memory, 1 << 20), MAPS, b"", ALLOWED_NAMES) is None


@given(st.binary(max_size=4 * PAGE), st.binary(max_size=256), st.binary(max_size=512))
def test_any_memory_ends_in_an_answer(library: bytes, array: bytes, maps: bytes) -> None:
    memory = segments(b"RANK=3")
    memory[ARRAY] = array.ljust(PAGE, b"\0")
    read_environ(FakeMemory(memory), MAPS + maps, maps, ALLOWED_NAMES)
    read_environ(FakeMemory(memory | {LIBC: elf("__environ", 64)[:64] + library}), MAPS, b"", ALLOWED_NAMES)
