"""Clocks of nodes from the ends of collectives: 50 ms and 5 s apart, measured or not, with dropped operations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from diagnosis_cases import facts, node, op, rank, shifted
from hypothesis import given, settings
from hypothesis import strategies as st

from probing.diagnosis.clocks import apart_ns, clock_offsets
from probing.diagnosis.facts import Operation, Rank

MS = 1_000_000
S = 1_000_000_000


def together(ranks: int, last: int, *, late: int = 0, ms: float = 40, seed: int = 7) -> list[list[Operation]]:
    """Operations 1 to ``last`` of ranks that end within 0.3 ms of each other; rank ``late`` calls ``ms`` late."""
    rng = random.Random(seed)
    by_rank: list[list[Operation]] = [[] for _ in range(ranks)]
    for seq in range(1, last + 1):
        end = (last - seq) * 0.1
        for number, own in enumerate(by_rank):
            took = 0.002 if number == late else 0.002 + ms / 1e3
            own.append(op(seq, ago=end + took, took=took + rng.uniform(0, 0.0003)))
    return by_rank


def ranks_of(by_rank: list[list[Operation]], *nodes: str) -> list[Rank]:
    return [rank(number, *own, node=name) for number, (own, name) in enumerate(zip(by_rank, nodes, strict=True))]


@pytest.mark.parametrize("seconds", [0.05, 5.0, -5.0, -0.05])
def test_a_clock_that_nobody_measured(seconds: float) -> None:
    a, b = ranks_of(together(2, 20), "a", "b")
    found = clock_offsets(facts(a, shifted(b, seconds)))
    assert found["a"].offset_ns == 0
    assert abs(found["b"].offset_ns - seconds * S) < found["b"].error_ns
    assert found["b"].error_ns <= 3 * MS


def test_the_more_exact_of_two_offsets_that_agree() -> None:
    a, b = ranks_of(together(2, 1), "a", "b")
    b = shifted(b, 0.05)
    measured = [node("a", [a]), node("b", [b], clock_offset_ns=50_100_000, clock_error_ns=300_000)]
    found = clock_offsets(facts(a, b, nodes=measured))
    assert (found["b"].offset_ns, found["b"].error_ns) == (50_100_000, 300_000)


def test_collectives_win_over_a_measurement_that_contradicts() -> None:
    a, b = ranks_of(together(2, 20), "a", "b")
    b = shifted(b, 5)
    measured = [node("a", [a]), node("b", [b], clock_offset_ns=0, clock_error_ns=1000)]
    assert abs(clock_offsets(facts(a, b, nodes=measured))["b"].offset_ns - 5 * S) < 3 * MS


def test_without_common_operations_the_measurement_counts() -> None:
    a, b = ranks_of(together(2, 3), "a", "b")
    b = rank(1, *(op(o.seq or 0, ago=1, took=0.1, comm="other") for o in b.done), node="b")
    measured = [node("a", [a]), node("b", [b], clock_offset_ns=7 * S, clock_error_ns=MS)]
    found = clock_offsets(facts(a, b, nodes=measured))
    assert (found["b"].offset_ns, found["b"].error_ns) == (7 * S, MS)


def test_a_node_that_is_reached_over_another_one() -> None:
    ops = together(4, 20)
    left, right = ops[:2], ops[2:]
    ranks = [
        rank(0, *left[0], node="a"),
        shifted(rank(1, *left[1], *(op(o.seq, ago=o_ago(o), took=0.01, comm="x") for o in left[1]), node="b"), 5),
        shifted(rank(2, *(op(o.seq, ago=o_ago(o), took=0.01, comm="x") for o in right[0]), node="c"), -3),
    ]
    found = clock_offsets(facts(*ranks))
    assert abs(found["b"].offset_ns - 5 * S) <= found["b"].error_ns
    assert abs(found["c"].offset_ns + 3 * S) <= found["c"].error_ns
    assert apart_ns(found, "b", "c") == found["b"].error_ns + found["c"].error_ns
    assert apart_ns(found, "b", "b") == 0


def o_ago(o: Operation) -> float:
    return (20 - (o.seq or 0)) * 0.1 + 0.05


def test_a_broadcast_ends_early_on_its_root_and_is_no_instant() -> None:
    a = rank(0, *(op(n, "broadcast", ago=30 - n, took=0.001) for n in range(20)))
    b = rank(1, *(op(n, "broadcast", ago=29.5 - n, took=0.001) for n in range(20)), node="b")
    assert clock_offsets(facts(a, b))["b"].offset_ns == 0


def test_an_operation_that_failed_ends_on_each_rank_by_itself() -> None:
    a = rank(0, *(op(n, ago=30 - n, took=0.001, state="failed") for n in range(20)))
    b = rank(1, *(op(n, ago=29.5 - n, took=0.001, state="failed") for n in range(20)), node="b")
    assert clock_offsets(facts(a, b))["b"].offset_ns == 0


@settings(deadline=None)
@given(
    offsets=st.lists(st.sampled_from((0.0, 0.05, -0.05, 5.0, -5.0, 0.0021)), min_size=3, max_size=3),
    late=st.integers(0, 3),
    ms=st.floats(0, 200),
    seed=st.integers(0, 1 << 30),
)
def test_the_error_bounds_the_offset_also_with_a_fifth_of_the_operations_dropped(
    offsets: list[float], late: int, ms: float, seed: int
) -> None:
    rng = random.Random(seed)
    ops = [[o for o in own if rng.random() > 0.2] for own in together(4, 40, late=late, ms=ms, seed=seed)]
    ranks = ranks_of(ops, "a", "b", "c", "d")
    moved = [ranks[0], *(shifted(r, s) for r, s in zip(ranks[1:], offsets, strict=True))]
    found = clock_offsets(facts(*moved))
    for name, seconds in zip("bcd", offsets, strict=True):
        assert abs(found[name].offset_ns - round(seconds * S)) <= found[name].error_ns <= 5 * MS


def test_numbers_that_count_sends_say_nothing_about_clocks() -> None:
    a, b = (list(own) for own in together(2, 20))
    # Rank 0 sent once more: its all_reduce has the number of the next one of rank 1.
    a = [op(1, "send", ago=9, took=0.001), *(replace(o, seq=(o.seq or 0) + 1) for o in a)]
    ranks = ranks_of([a, b], "a", "b")
    assert clock_offsets(facts(*ranks))["b"].offset_ns == 0
    measured = [node("a"), node("b", clock_offset_ns=MS, clock_error_ns=MS)]
    found = clock_offsets(facts(*ranks, nodes=measured))
    assert (found["b"].offset_ns, found["b"].error_ns) == (MS, MS)
