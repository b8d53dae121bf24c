"""Lines of sampled code: as the walk finds them, whatever the table is, and at a cost that no table raises."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.python_stack.sampling.line_index import MAX_TABLE, line_index
from probing.daemon.python_stack.walk import codes as walk_codes
from probing.daemon.python_stack.walk.codes import line_of


def codes_of(code: CodeType) -> list[CodeType]:
    return [code, *(c for const in code.co_consts if isinstance(const, CodeType) for c in codes_of(const))]


@given(
    kind=st.sampled_from(["lnotab", "ranges", "locations"]),
    table=st.binary(max_size=600) | st.lists(st.sampled_from(b"\x80\xe8\xf0\xfe\x7f\x01\xd7"), max_size=99).map(bytes),
    first=st.integers(-(2**31), 2**31 - 1),
    offsets=st.lists(st.integers(0, 400) | st.integers(0, 2**31 - 1), min_size=1),
)
def test_any_table_has_the_lines_that_the_walk_finds(kind: Any, table: bytes, first: int, offsets: list[int]) -> None:
    index = line_index(kind, table, first)
    assert [index.line(offset) for offset in offsets] == [line_of(kind, table, first, offset) for offset in offsets]


@pytest.mark.skipif(not hasattr(CodeType, "co_positions"), reason="this interpreter is older than 3.11")
def test_the_lines_of_a_module() -> None:
    for code in codes_of(compile(Path(walk_codes.__file__).read_text(), "x", "exec")):
        index = line_index("locations", code.co_linetable, code.co_firstlineno)
        units = [position[0] for position in code.co_positions()]
        assert [index.line(2 * unit) for unit in range(len(units))] == units
        assert index.bytes < 16 * sys.getsizeof(code.co_linetable)


@pytest.mark.parametrize("kind", ["lnotab", "ranges", "locations"])
@pytest.mark.parametrize("table", [b"\x80" * (MAX_TABLE + 1), b"\x80" + bytes(MAX_TABLE)])
def test_a_table_beyond_the_limit_has_no_lines(kind: Any, table: bytes) -> None:
    assert [line_index(kind, table, 7).line(offset) for offset in (0, 1, 2**31 - 1)] == [None] * 3
