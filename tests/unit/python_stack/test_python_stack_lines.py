"""Line tables: the interpreter that runs this test is the reference for its own, older ones are written out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.python_stack.walk import codes as walk_codes
from probing.daemon.python_stack.walk.codes import line_of

SOURCE = (
    "def f(a, b=(1,\n   2)):\n    x = [i\n  for i in a if i]\n\n\n"
    "    with b as c:\n        try:\n            return (x\n"
    "   + f(\n 1,\n\n 2))\n        finally:\n            del x\n    " + "\n" * 70_000 + "    return lambda: (yield)\n"
)


def codes(code: CodeType) -> list[CodeType]:
    return [code, *(c for const in code.co_consts if isinstance(const, CodeType) for c in codes(const))]


@pytest.mark.skipif(not hasattr(CodeType, "co_positions"), reason="this interpreter is older than 3.11")
def test_locations_as_this_interpreter_has_them() -> None:
    modules = [compile(SOURCE, "x", "exec")]
    for other in (walk_codes, pytest, sys.modules["_pytest.outcomes"]):
        modules.append(compile(Path(other.__file__ or "").read_text(), "x", "exec"))  # noqa: PERF401
    compared = 0
    for module in modules:
        for code in codes(module):
            for unit, position in enumerate(code.co_positions()):
                found = line_of("locations", code.co_linetable, code.co_firstlineno, unit * 2)
                assert found == position[0]
                compared += 1
    assert compared > 1_000


def test_a_frame_that_has_not_begun_is_at_the_first_line() -> None:
    for kind in ("lnotab", "ranges", "locations"):
        assert line_of(kind, b"", 42, -2) == 42  # type: ignore[arg-type]


# Objects/lnotab_notes.txt (3.9): byte offsets 0, 6, 50, 350, 361 at lines 1, 2, 7, 207, 208.
NOTES = bytes([0, 1, 6, 1, 44, 5, 255, 0, 45, 127, 0, 73, 11, 1])


@pytest.mark.parametrize(
    ("offset", "line"), [(0, 1), (5, 1), (6, 2), (49, 2), (50, 7), (349, 7), (350, 207), (361, 208), (9999, 208)]
)
def test_lnotab(offset: int, line: int) -> None:
    assert line_of("lnotab", NOTES, 0, offset) == line


def test_lnotab_goes_back() -> None:
    assert [line_of("lnotab", bytes([0, 10, 4, 0xFD]), 1, at) for at in (0, 4)] == [11, 8]


def test_ranges() -> None:
    # PEP 626's kind of table: 4 bytes on +2, 2 bytes without a line, 6 bytes on -1, 254 and 2 bytes on one far line.
    table = bytes([4, 2, 2, 0x80, 6, 0xFF, 0, 127, 254, 1, 2, 0])
    found = [line_of("ranges", table, 10, at) for at in (0, 3, 4, 5, 6, 11, 12, 265, 266, 267, 268)]
    assert found == [12, 12, None, None, 11, 11, 139, 139, 139, 139, None]


@given(
    kind=st.sampled_from(["lnotab", "ranges", "locations"]),
    table=st.binary(max_size=6000),
    first=st.integers(-(2**31), 2**31 - 1),
    offset=st.integers(-(2**63), 2**63),
)
def test_any_table_gives_a_line_or_none(kind: str, table: bytes, first: int, offset: int) -> None:
    line = line_of(kind, table, first, offset)  # type: ignore[arg-type]
    assert line is None or -(2**31) <= line < 2**31
