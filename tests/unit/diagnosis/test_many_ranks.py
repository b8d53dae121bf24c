"""Thousands of ranks: the work grows with their number, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import (
    C10D,
    WORLD,
    ago,
    comm,
    elsewhere,
    facts,
    history,
    in_collective,
    instructions,
    node,
    op,
    rank,
    thread,
)
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Condition, Endpoint, Exit, Facts, NodeFacts, Rank, Witness
from probing.diagnosis.hardware_facts import Gpu, Hardware
from probing.diagnosis.holdups import hold_ups
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.peer_sockets import first_to_close
from probing.diagnosis.ranks import companions
from probing.diagnosis.rules import communicator_error, death, mismatch
from probing.diagnosis.wait_graph import Pending, WaitGraph
from probing.diagnosis.waits import Wait

COMPILES = elsewhere("run /site-packages/torch/_dynamo/convert_frame.py:40")


def pair(number: int) -> str:
    return f"tp{number // 2}"


def of_pairs(*ranks: Rank, **fields: Any) -> Facts:
    pairs = [comm(pair(first), (first, first + 1), backend="nccl") for first in range(0, len(ranks), 2)]
    return facts(*ranks, comms=[comm(WORLD, range(len(ranks)), backend="nccl"), *pairs], **fields)


def aborted(count: int) -> Callable[[], object]:
    """Each rank has aborted the communicator of its pair."""

    def made(number: int) -> Rank:
        failed = op(7, ago=39, took=29, comm=pair(number), state="failed", error="aborted")
        witness = Witness("probe", pair(number), ago(10), aborted=True, state="aborted")
        return rank(number, failed, witnesses=(witness,))

    given = of_pairs(*map(made, range(count)))
    return lambda: list(communicator_error.find(Case(given)))


def lost_peers(count: int) -> Callable[[], object]:
    """The error of each rank names a socket of the next rank."""

    def made(number: int) -> Rank:
        error = f"Connection closed by peer [10.0.0.9]:{46000 + (number + 1) % count}."
        failed = op(9, ago=20, took=0.1, state="failed", error=error)
        return rank(number, failed, exit=Exit(ago(20), 1), endpoints=(Endpoint("10.0.0.9", 46000 + number),))

    case = Case(facts(*map(made, range(count))))
    return lambda: first_to_close(case, ())


def compiling(count: int) -> Callable[[], object]:
    """Half of the ranks wait for the other half, which compiles."""
    waits = [rank(n, op(7, ago=39), stack=in_collective()) for n in range(count // 2)]
    case = Case(facts(*waits, *(rank(n, *history(6, ago=40), stack=COMPILES) for n in range(count // 2, count))))
    _ = case.waits
    return lambda: [case.activity(n) for n in range(count)]


def torn(count: int) -> Callable[[], object]:
    """Half of the ranks leave the sequence that the job repeats."""
    names = ("all_reduce", "all_gather")

    def made(number: int) -> Rank:
        other = "barrier" if number < count // 2 else "all_reduce"
        return rank(
            number, *history(39, ago=40, length=16, names=names), op(40, other, ago=39), stack=in_collective(other)
        )

    case = Case(facts(*map(made, range(count))))
    _ = case.disagreements
    return lambda: list(mismatch.find(case))


def receiving(count: int) -> Callable[[], object]:
    """Each rank waits in a receive that was not recorded: it is seen on its stack alone."""
    stack = thread(f"recv {C10D}:2400", "train train.py:40", since_ns=ago(60))
    case = Case(facts(*(rank(n, stack=stack) for n in range(count))))
    return lambda: case.graph


def receiving_from_any(count: int) -> Callable[[], object]:
    """Each rank has a receive from any rank in flight."""
    case = Case(facts(*(rank(n, op(n, "recv_any_source", ago=60)) for n in range(count))))
    _ = case.sequences
    return lambda: case.in_flight


def starved(count: int) -> Callable[[], object]:
    """Each rank waits for a CPU that another process uses."""

    def made(number: int) -> Rank:
        busy = Condition(
            state="R",
            interval_ns=10**9,
            run_delay_ns=9 * 10**8,
            cpus_allowed=1,
            cpu_list="0",
            neighbours=(("x", 9, 9),),
        )
        return rank(number, node=f"n{number // 4}", stack=elsewhere(), condition=busy)

    ranks = [made(number) for number in range(count)]
    nodes = [node(f"n{number}", idle_cpus=(5,)) for number in range(count // 4)]
    case = Case(facts(*ranks, nodes=nodes))
    return lambda: [case.activity(number) for number in range(count)]


def left(count: int) -> Callable[[], object]:
    """Half of the ranks have exited with code 0, and the others wait, each in an operation of its own pair."""

    def made(number: int) -> Rank:
        if number < count // 2:
            return rank(number, *history(9, ago=60, comm=pair(number)), exit=Exit(ago(50), 0), state="exited")
        return rank(number, op(9, ago=40, comm=pair(number)), stack=in_collective())

    case = Case(of_pairs(*map(made, range(count))))
    _ = case.waits, case.sequences
    return lambda: list(death.find(case))


def in_kernels(count: int) -> Callable[[], object]:
    """Each pair hangs in an operation that both have joined; each node has a faulty GPU, and witnesses report."""

    def made(number: int) -> Rank:
        witness = Witness("ras", pair(number), ago(1), launched=(("all_reduce", 9),))
        own = [op(9, ago=60, comm=pair(number)), *history(8, ago=61, comm=pair(number))]
        return rank(number, *own, node=f"n{number // 4}", witnesses=(witness,), stack=in_collective())

    def of(number: int) -> NodeFacts:
        gpus = tuple(Gpu(at, (4 * number + at,), state="lost") for at in range(4))
        return node(f"n{number}", hardware=Hardware(gpus=gpus))

    given = of_pairs(*map(made, range(count)), nodes=[of(number) for number in range(count // 4)])
    return lambda: diagnose(given)


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (aborted, 200),
        (lost_peers, 200),
        (compiling, 200),
        (torn, 400),
        (receiving, 100),
        (receiving_from_any, 100),
        (starved, 200),
        (left, 200),
        (in_kernels, 400),
    ],
)
def test_twice_the_ranks_are_twice_the_work(made: Callable[[int], Callable[[], object]], count: int) -> None:
    assert instructions(made(2 * count)) < 2.6 * instructions(made(count))


class _Ranks(frozenset[int]):
    """A set that counts its intersections."""

    compared = 0

    def __and__(self, other: Any) -> frozenset[int]:
        _Ranks.compared += 1
        return frozenset(self) & other


def test_the_awaited_ranks_of_an_operation_are_compared_once_for_all_that_wait_in_it() -> None:
    waiting, awaited = range(500), range(500, 1000)
    stacks = {n: in_collective() if n in waiting else elsewhere() for n in range(1000)}
    ranks = [rank(n, *(op(s, ago=39) for s in (7,) if n in waiting), stack=stacks[n]) for n in range(1000)]
    case = Case(facts(*ranks))
    waits = {n: Wait(WORLD, 7, "all_reduce", ago(39)) for n in waiting}
    case.__dict__["graph"] = WaitGraph(waits, [Pending(WORLD, 7, "all_reduce", tuple(waiting), _Ranks(awaited))])
    _Ranks.compared = 0
    [found] = hold_ups(case)
    assert (found.ranks, found.victims, found.edge.awaited) == (tuple(awaited), tuple(waiting), 500)
    assert _Ranks.compared <= 4


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), max_size=8))
def test_hold_ups_that_share_a_rank_are_one(parts: list[set[int]]) -> None:
    waits = {100 + n: Wait(None, n, "all_reduce", ago(39)) for n in range(len(parts))}
    operations = [Pending(None, n, "all_reduce", (100 + n,), frozenset(part)) for n, part in enumerate(parts)]
    case = Case(facts(*(rank(n, op(7, ago=39), stack=in_collective()) for n in waits)))
    case.__dict__["graph"] = WaitGraph(waits, operations)
    found = {frozenset(one.ranks) for one in hold_ups(case)}
    wanted: list[set[int]] = []
    for part in parts:
        touching = [other for other in wanted if other & part]
        wanted = [other for other in wanted if other not in touching] + [part.union(*touching)]
    assert found == set(map(frozenset, wanted))


@given(st.lists(st.tuples(st.integers(0, 5) | st.none(), st.sets(st.integers(0, 4))), max_size=12))
def test_companions_are_the_other_ranks_with_a_tie(processes: list[tuple[int | None, set[int]]]) -> None:
    def of(rank: int | None, ties: set[int]) -> int:
        return len({other for other, own in processes if ties & own} - {rank, None})

    assert companions(processes) == [of(*one) for one in processes]


def test_a_rank_that_compiles_alone_is_told_apart_from_two() -> None:
    waits = [rank(n, op(7, ago=39), stack=in_collective()) for n in (0, 1)]
    alone, other = (rank(n, *history(6, ago=40), stack=COMPILES) for n in (2, 3))
    assert "no other rank does" in Case(facts(*waits, alone)).activity(2).why
    assert "no other rank does" not in Case(facts(*waits, alone, other)).activity(2).why
    assert "no other rank does" not in Case(facts(replace(alone, rank=0))).activity(0).why
