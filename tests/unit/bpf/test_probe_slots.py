"""Probe slots: one owner each, and the numbers that the C side knows."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from probing.api.errors import InternalError
from probing.daemon.bpf.build import FOLDER
from probing.daemon.bpf.probe_slots import PROBE_SLOTS, SLOTS, SlotRegistry
from probing.daemon.collector import collector  # noqa: F401  it imports whoever reserves slots


def defined(pattern: str) -> dict[str, int]:
    """The macros of our C headers whose names match."""
    text = "\n".join(Path(header).read_text() for header in FOLDER.glob("*.bpf.h"))
    return {name: int(value) for name, value in re.findall(rf"^#define ({pattern}) (\d+)\b", text, re.MULTILINE)}


def test_slots_are_given_out_by_name() -> None:
    registry = SlotRegistry()
    assert list(registry.reserve("a", 3, 2)) == [3, 4]
    assert list(registry.reserve("b", 5)) == [5]
    assert registry.blocks == {"a": range(3, 5), "b": range(5, 6)}


@pytest.mark.parametrize(("first", "count"), [(9, 2), (10, 1), (12, 1), (14, 9), (0, 64), (11, 2)])
def test_an_overlap_is_refused(first: int, count: int) -> None:
    registry = SlotRegistry(64)
    registry.reserve("a", 10, 5)
    with pytest.raises(InternalError, match=r"b wants the probe slots .* a has 10 to 14"):
        registry.reserve("b", first, count)
    assert registry.blocks == {"a": range(10, 15)}


def test_a_name_gets_slots_once() -> None:
    registry = SlotRegistry()
    registry.reserve("a", 1)
    with pytest.raises(InternalError, match="a has 1 to 1"):
        registry.reserve("a", 2)


@pytest.mark.parametrize(("first", "count"), [(64, 1), (60, 5), (-1, 1), (300, 1)])
def test_slots_beyond_the_limit_are_refused(first: int, count: int) -> None:
    registry = SlotRegistry(64)
    registry.reserve("the last ones", 60, 4)
    with pytest.raises(InternalError, match="not all below 64"):
        registry.reserve("a", first, count)


def test_the_limit_is_that_of_the_programs() -> None:
    assert defined("PROBE_SLOTS") == {"PROBE_SLOTS": PROBE_SLOTS}


def test_slots_that_c_names_are_reserved_by_these_names() -> None:
    named = defined(r"\w+_SLOT")
    assert named == {"OPEN_SLOT": 253, "SAMPLES_SLOT": 254, "AWAY_SLOT": 255}
    assert {name: list(SLOTS.blocks[name]) for name in named} == {name: [slot] for name, slot in named.items()}


def test_slots_of_all_sources_are_distinct_and_below_the_limit() -> None:
    blocks = SLOTS.blocks
    assert {"gloo", "nccl", "cuda completion", "cuda memory", "cuda launches", "logs", "optimizer"} <= blocks.keys()
    assert all(not set(one) & set(other) for one, other in combinations(blocks.values(), 2))
    assert all(0 <= slot < defined("PROBE_SLOTS")["PROBE_SLOTS"] for block in blocks.values() for slot in block)
