"""What communicators are for: evidence by hand, evidence by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import Processes
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.nccl_uprobes.communicators import parallel_roles
from probing.daemon.nccl_uprobes.communicators.parallel_roles import Facts, Role, Uses, conclude, stride_of
from probing.daemon.nccl_uprobes.records.entities import Entity
from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.source import Identity

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


SECOND = 1_000_000_000


def called(*communicators: tuple[int, str]) -> Operations:
    """An all_reduce of each (pid, communicator)."""
    entities = [Entity(pid, 7, None, 1, comm, None, 0, 4, None) for pid, comm in communicators]
    ones = np.ones(len(entities), np.int64)
    op = np.full(len(entities), OPS.index("all_reduce"), np.int32)
    of = np.arange(len(entities))
    return Operations(entities, of, op, op, op, ones, ones, ones, ones, ones, ones)


def test_thousands_of_communicators_of_a_process_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    concluded: list[int] = []

    def judged(own: Facts, others: list[Facts]) -> Role:
        concluded.append(len(others))
        return conclude(own, others)

    monkeypatch.setattr(parallel_roles, "conclude", judged)
    uses = Uses(Processes(*(Identity(pid, 7, "j", "r", "trainer", 0, 0, 8, 0) for pid in (11, 12))))
    # GIVEN a process with very many communicators, and then one with a single communicator
    uses.observe(called(*((11, f"c{n}") for n in range(3_000)), (12, "c0")))
    # THEN a round judges some of them, against some others, and in its turn the single one
    first = [key for key, _, _ in uses.changed(10 * SECOND)]
    assert (len(first), len(concluded)) == (128, 128)
    assert (12, 7, "c0") in first
    assert max(concluded) <= 32
    # and the next round comes later, and judges others.
    assert uses.changed(10 * SECOND + 1) == []
    second = [key for key, _, _ in uses.changed(11 * SECOND)]
    assert len(set(second) - set(first)) == 128


def test_each_communicator_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_roles, "_MAX_OF_ROUND", 2)
    monkeypatch.setattr(parallel_roles, "_MANY", 2)
    uses = Uses(Processes())
    # GIVEN more processes that use a communicator all the time than rounds conclude before the first is due again
    concluded = set()
    for quarter in range(40):
        uses.observe(called(*((pid, "c") for pid in range(11, 41))))
        concluded |= {pid for (pid, _, _), _, _ in uses.changed(10 * SECOND + quarter * SECOND // 4)}
    # THEN none waits for ever
    assert concluded == {*range(11, 41)}


def test_the_process_with_the_most_communicators_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_roles, "_MAX_USES", 4)
    uses = Uses(Processes())
    uses.observe(called((12, "a"), (12, "b"), *((11, f"c{n}") for n in range(7))))
    assert {key for key, _, _ in uses.changed(10 * SECOND)} == {
        (12, 7, "a"), (12, 7, "b"), (11, 7, "c5"), (11, 7, "c6")
    }  # fmt: skip
    uses.forget([(12, 7), (13, 7)])
    uses.observe(called((13, "d"), (13, "e")))
    assert {key for key, _, _ in uses.changed(20 * SECOND)} == {(13, 7, "d"), (13, 7, "e")}
