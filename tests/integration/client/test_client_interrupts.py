"""Ctrl-C: each command leaves at once, with its exit code and the terminal as it was. 200 rounds: tests/soak."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupts import COMMANDS, PLACES, SCREEN, Nodes, check, interrupted
from long import long_unless


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


_IN_GATE = {("answers", None), ("waits", 0.02), ("silent", None)}
_CASES = [long_unless(case in _IN_GATE, *case) for case in itertools.product(PLACES, (None, 0.02))]
_GATE_COMMANDS = {"ps", "query --all-nodes 'SELECT op, count(*) FROM comm.ops GROUP BY op'", "logs --follow", "stacks"}


@pytest.mark.parametrize(("place", "again"), _CASES)
def test_top_leaves_at_ctrl_c(nodes: Nodes, place: str, again: float | None) -> None:
    for delay in (0.0, 0.7):
        with nodes.at(place) as address:
            left = interrupted(["top", "--all-nodes"], address, delay, again, SCREEN)
        check(["top"], left)
        assert (left.code, left.before) == (0, False)


@pytest.mark.parametrize(
    "command", [long_unless(c in _GATE_COMMANDS, c) for c in COMMANDS if not c.startswith("top -")]
)
def test_a_command_beside_a_silent_node_leaves_with_130(nodes: Nodes, command: str) -> None:
    words = shlex.split(command)
    with nodes.at("silent") as address:
        left = interrupted(words, address, 0.3)
    check(words, left)
    assert (left.code, left.before) == (130, False)
