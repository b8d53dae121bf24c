"""What communicators are for: evidence by hand, evidence by chance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, conclude, stride_of
from probing.daemon.nccl_uprobes.records.names import OPS

BUSY = {"all_reduce": 800}
RARE = {"all_reduce": 50}


def facts(**values: Any) -> Facts:
    given = {"size": 2, "world_size": 8, "name": None, "ranks": {}, "calls": BUSY, "sizes": {}, **values}
    return Facts(**given)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("TENSOR_MODEL_PARALLEL_GR", "tp"),
        ("PIPELINE_MODEL_PARALLEL_", "pp"),
        ("DATA_PARALLEL_GROUP_WITH", "dp"),
        ("EXPERT_DATA_PARALLEL_GRO", "dp"),
        ("EXPERT_MODEL_PARALLEL_GR", "ep"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_tp", "tp"),
        ("tp:0", "tp"),
    ],
)
def test_names_of_frameworks(name: str, role: str) -> None:
    found = conclude(facts(name=name), [])
    assert (found.name, found.why) == (role, f"its name is {name}")


@pytest.mark.parametrize("name", ["TENSOR_AND_DATA_PARALLEL", "default_pg", "stop", "adept", None, "", "\x1b[2J"])
def test_names_that_say_nothing(name: str | None) -> None:
    assert conclude(facts(name=name), []).name == "unknown"


def test_all_ranks_are_the_world() -> None:
    found = conclude(facts(size=8, name="default_pg", calls={}), [])
    assert (found.name, found.why) == ("world", "has all 8 ranks of the job")
    assert conclude(facts(size=8, name="mesh_dp", calls={}), []).name == "dp"


@pytest.mark.parametrize(
    ("calls", "role"),
    [
        ({"send": 40, "recv": 40, "barrier": 1}, "pp"),
        ({"send": 4, "recv": 4}, "unknown"),
        ({"all_to_all": 30, "all_reduce": 20}, "ep"),
        ({"broadcast": 50}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_operations_that_tell_the_role(calls: dict[str, int], role: str) -> None:
    assert conclude(facts(calls=calls), []).name == role


def test_neighbours_that_talk_often_are_tensor_parallel() -> None:
    row = facts(ranks={0: 4, 1: 5}, calls=BUSY, sizes={"all_reduce": 80_000})
    column = facts(ranks={0: 0, 1: 4}, calls=RARE, sizes={"all_reduce": 5_000_000})
    assert conclude(row, [column]).name == "tp"
    assert conclude(column, [row]).name == "dp"
    assert conclude(column, [row]).why == (
        "its ranks are 4 apart; 50 operations of 100000 bytes, against 800 of 100 bytes on neighbours"
    )
    world = facts(size=8, ranks={0: 0, 4: 4}, calls=BUSY)
    assert conclude(column, [world]).name == "unknown"
    assert conclude(row, []).name == "unknown"
    assert conclude(facts(ranks={0: 4, 1: 5}), [facts(ranks={0: 0, 1: 4})]).name == "unknown"


@pytest.mark.parametrize(
    ("ranks", "stride"),
    [
        ({0: 0, 1: 1, 2: 2, 3: 3}, 1),
        ({0: 1, 3: 7}, 2),
        ({0: 0, 1: 2, 2: 3}, None),
        ({0: 3, 1: 1}, None),
        ({0: 5, 1: 5}, None),
        ({1: 5}, 1),
        ({1: 3}, 2),
        ({0: 0}, None),
        ({3: 7}, None),
        ({}, None),
    ],
)
def test_strides(ranks: dict[int, int], stride: int | None) -> None:
    assert stride_of(ranks, 4, 8) == stride


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    number = st.one_of(st.none(), st.integers(-3, 2**31))
    counts = st.dictionaries(st.sampled_from(OPS), st.integers(0, 2**62))
    ranks = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), max_size=5)
    text = st.one_of(st.none(), st.text(max_size=24))
    return Facts(draw(number), draw(number), draw(text), draw(ranks), draw(counts), draw(counts))


@given(any_facts(), st.lists(any_facts(), max_size=3))
def test_hostile_facts_give_a_role(own: Facts, others: list[Facts]) -> None:
    assert conclude(own, others).name in ("world", "tp", "pp", "dp", "ep", "unknown")
