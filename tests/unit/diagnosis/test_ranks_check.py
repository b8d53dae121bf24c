"""How the ranks of a job must be numbered and placed, and the rule of the launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.ranks import Placed, check_ranks, check_workers, launched


def members(world: int = 4, per_node: int = 2) -> list[Placed]:
    return [
        Placed(n, n % per_node, world, f"n{n // per_node}", 100 + n, node_rank=n // per_node, master="n0:29500", step=7)
        for n in range(world)
    ]


def texts(found: list[Placed], *, whole: bool = True) -> list[str]:
    return [violation.text for violation in check_ranks(found, whole=whole)]


def test_a_job_in_order() -> None:
    assert texts(members()) == []
    assert texts([replace(m, step=7 + (m.rank or 0) % 2) for m in members()]) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rank": 2}, ["RANK 2 occurs 2 times: pid 102 on n1, pid 103 on n1", "RANK 3 of 4 has no process"]),
        ({"rank": 4}, ["RANK 4 is outside of 0 to 3: pid 103 on n1", "RANK 3 of 4 has no process"]),
        ({"rank": None}, ["no RANK is known for pid 103 on n1", "RANK 3 of 4 has no process"]),
        ({"local_rank": 0}, ["LOCAL_RANK 0 occurs 2 times on n1: pid 102 on n1, pid 103 on n1"]),
        ({"local_rank": 0, "box": "another pod"}, []),
        ({"world_size": 8}, ["WORLD_SIZE differs: 4 on ranks 0-2; 8 on rank 3"]),
        ({"master": "n1:29500"}, ["MASTER_ADDR:MASTER_PORT differs: n0:29500 on ranks 0-2; n1:29500 on rank 3"]),
        ({"step": 5}, ["steps differ by more than 1: step 5 on rank 3; step 7 on ranks 0-2"]),
        ({"step": 5, "counted_by": "another node"}, []),
        ({"step": None}, []),
    ],
)
def test_one_rank_out_of_order(change: dict[str, object], expected: list[str]) -> None:
    own = members()
    own[3] = replace(own[3], **change)
    assert texts(own) == expected


def test_a_rank_that_was_not_looked_for_is_not_missing() -> None:
    assert texts(members()[:3]) == ["RANK 3 of 4 has no process"]
    assert texts(members()[:3], whole=False) == []


def test_a_hostile_world_size_costs_nothing() -> None:
    (text,) = texts([replace(members()[0], world_size=2**31 - 1)])
    assert text.startswith("RANK 1-16 and ")
    assert text.endswith("and 2147483630 more of 2147483647 have no process")


@given(st.integers(1, 64), st.integers(1, 8), st.randoms())
def test_any_job_in_order_has_no_violation(world: int, per_node: int, random: object) -> None:
    own = members(world, per_node)
    random.shuffle(own)  # type: ignore[attr-defined]
    assert texts(own) == []
    if world > 1:
        assert texts([m for m in own if m.rank != world // 2]) == [f"RANK {world // 2} of {world} has no process"]


# The two tables of the launcher's documentation.
@pytest.mark.parametrize(
    ("workers", "master", "expected"),
    [
        (
            ["gn6-0", "gn39-0", "gn40-0", "gn7-0"],
            "gn6-0",
            [("gn6-0", 0, 0, 0), ("gn39-0", 1, 0, 1), ("gn40-0", 2, 0, 2), ("gn7-0", 3, 0, 3)],
        ),
        (
            ["gn6-0", "gn6-1", "gn7-0", "gn7-1"],
            "gn6-1",
            [("gn6-0", 0, 0, 0), ("gn6-1", 1, 1, 0), ("gn7-0", 2, 0, 1), ("gn7-1", 3, 1, 1)],
        ),
        (
            ["gn6-0", "gn6-1", "gn7-0", "gn7-1"],
            "gn6",
            [("gn6-0", 0, 0, 0), ("gn6-1", 1, 1, 0), ("gn7-0", 2, 0, 1), ("gn7-1", 3, 1, 1)],
        ),
        (
            ["b-1", "b-10", "b-2", "a-3-0"],
            "b-2",
            [("b-1", 0, 0, 0), ("b-2", 1, 1, 0), ("b-10", 2, 2, 0), ("a-3-0", 3, 0, 1)],
        ),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_rule_of_the_launcher(
    workers: list[str], master: str, expected: list[tuple[str, int, int, int]], backwards: bool
) -> None:
    found = launched(workers[::-1] if backwards else workers, master)
    assert [(w.worker, w.rank, w.local_rank, w.node_rank) for w in found] == expected
    environment = {(w.world_size, w.master_addr, w.master_port, w.backend) for w in found}
    assert environment == {(len(workers), expected[0][0].rpartition("-")[0], 29500, "nccl")}


@pytest.mark.parametrize(
    ("workers", "master", "problem"),
    [
        (["a-0", "a-0"], "a-0", "a-0 occurs twice"),
        (["a-0", "a-00"], "a-0", "a-00 occurs twice"),
        (["a"], "a", "a is not a worker"),
        (["a-0"], "b-0", "the master b-0 is not among"),
        (["a-0"], "b", "the master b is not among"),
    ],
)
def test_a_list_of_workers_that_makes_no_sense(workers: list[str], master: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        launched(workers, master)


def test_a_job_that_was_not_started_by_the_rule() -> None:
    workers = launched(["n0-0", "n0-1", "n1-0", "n1-1"], "n0")
    assert check_workers(members(), workers) == []
    assert check_workers(members(), []) == []
    (violation,) = check_workers([*members()[:3], replace(members()[3], node="n7", node_rank=7)], workers)
    assert violation.text == (
        "RANK 3 (pid 103 on n7) has node n7 instead of n1, NODE_RANK 7 instead of 1, which the launcher gives n1-1"
    )


def test_many_different_masters_are_not_all_named() -> None:
    own = [replace(members()[0], rank=r, local_rank=r, master=f"m{r:03}:1", world_size=100) for r in range(100)]
    (text,) = texts(own)
    assert text.endswith("; m015:1 on rank 15; 84 more")
