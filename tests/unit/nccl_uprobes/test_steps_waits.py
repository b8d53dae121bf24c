"""`train.steps.wait_ns`: how long a rank waited for others of its node, against `balance` and known durations."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from fakes import Processes, Sink
from operation_support import operations_of

from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.steps.numbering import SLOTS
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.source import Identity
from probing.diagnosis.balance import Pair, RankTimes, balance

MS = 1_000_000
PAIR = ClockPair(mono_ns=0, boot_ns=0, real_ns=1_700_000_000_000_000_000)
PACE = 200 * MS
Row = dict[str, Any]


def identify(pid: int, start_ns: int) -> Identity | None:
    """Ranks 0 to 9 of job a have their rank as pid, those of job b are 10 more."""
    return Identity(pid, start_ns, "ab"[pid // 10], "run", "trainer", rank=pid % 10, world_size=4)


def operations(pid: int, calls: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Row]:
    """Rows of comm.ops, an operation each PACE ns that ends 100 ms after it: each waits so many ns before it ends."""
    made = []
    for seq, (duration, changes) in enumerate(calls):
        end = PAIR.real_ns + seq * PACE + 100 * MS
        row = {"ts": end - duration, "pid": pid, "start_ns": 7, "comm": "0", "comm_name": "pg", "seq": seq}
        row |= {"op": "all_reduce", "dtype": "float32", "count": 5 + seq % 3, "bytes": 20}
        made.append({**row, "start_ns_after": 0, "done_hi_ns": duration, **changes})
    return made


def steps_of(*ranks: list[Row], size: int = 40) -> dict[int, list[int | None]]:
    """`wait_ns` of the steps of each process, where the operations of all come in the order of their ends."""
    sink = Sink("train.steps", may_lose=False)
    steps = Steps("n1", Processes(identify=identify), sink)
    rows = sorted((row for rank in ranks for row in rank), key=lambda row: (row["ts"] + row["done_hi_ns"], row["pid"]))
    for start in range(0, len(rows), size):
        steps.observe(operations_of(rows[start : start + size], PAIR), PAIR)
    return {pid: [row["wait_ns"] for row in sink.rows if row["pid"] == pid] for pid in sorted({r["pid"] for r in rows})}


def alike(duration: int, steps: int = 30, **changes: object) -> list[tuple[int, Mapping[str, Any]]]:
    return [(duration, changes)] * (3 * steps)


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_a_rank_waits_for_the_rank_that_calls_last(size: int) -> None:
    # GIVEN rank 1, which calls 30 ms after rank 0, each of three times in a step
    found = steps_of(operations(0, alike(40 * MS)), operations(1, alike(10 * MS)), size=size)
    # THEN rank 0 waits in each step, and rank 1 never
    assert len(found[0]) == len(found[1]) == 29
    assert set(found[0]) == {90 * MS}
    assert set(found[1]) == {0}


def test_of_three_ranks_each_waits_for_the_last() -> None:
    found = steps_of(*(operations(rank, alike((1 + 10 * rank) * MS)) for rank in range(3)))
    assert [set(found[rank]) for rank in range(3)] == [{0}, {30 * MS}, {60 * MS}]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (operations(0, alike(40 * MS)), []),
        # another job, whose communicator has the same name
        (operations(0, alike(40 * MS)), operations(11, alike(10 * MS))),
        # another communicator
        (operations(0, alike(40 * MS)), operations(1, alike(10 * MS, comm="1"))),
        # operations that do not end on all ranks together
        (operations(0, alike(40 * MS, op="broadcast")), operations(1, alike(10 * MS, op="broadcast"))),
        (operations(0, alike(40 * MS, op="send")), operations(1, alike(10 * MS, op="recv"))),
        # times and sequence numbers that are not known
        (operations(0, alike(40 * MS)), operations(1, alike(10 * MS, start_ns_after=None))),
        (operations(0, alike(40 * MS, seq=None)), operations(1, alike(10 * MS, seq=None))),
    ],
)
def test_what_is_not_known_is_null(one: list[Row], other: list[Row]) -> None:
    waits = {wait for each in steps_of(one, other).values() for wait in each}
    assert waits == {None}


def test_a_rank_that_is_reported_twice_is_not_two_ranks() -> None:
    assert set(steps_of(operations(0, alike(40 * MS)), operations(0, alike(10 * MS)))[0]) == {None}


def test_a_wait_is_no_longer_than_the_operations() -> None:
    # GIVEN pairs of operations that run at once, so that the time in them is less than their sum
    rows = {rank: operations(rank, alike(duration)) for rank, duration in ((0, 40 * MS), (1, 10 * MS))}
    for own in rows.values():
        for row, second in zip(own[::2], own[1::2], strict=True):
            second |= {"ts": row["ts"] + 1, "count": 99}
            row["count"] = 5
    # THEN two waits of 30 ms are no more than the 40 ms in which they are
    found = steps_of(rows[0], rows[1])
    assert found[0]
    assert set(found[0]) == {40 * MS + 1}


def test_more_operations_than_are_remembered_take_nothing_from_the_newest() -> None:
    steps = SLOTS // 3 + 100
    found = steps_of(operations(0, alike(40 * MS, steps)), operations(1, alike(10 * MS, steps)))
    assert set(found[0]) == {90 * MS}


def test_a_process_group_that_is_made_again_is_not_compared_with_the_earlier_one() -> None:
    # GIVEN two ranks, of which one later makes a group of the same name with ranks of other nodes
    first = operations(0, alike(40 * MS))
    again = [{**row, "ts": row["ts"] + 60_000 * MS} for row in operations(0, alike(40 * MS))]
    waits = steps_of([*first, *again], operations(1, alike(10 * MS)))[0]
    # THEN it is not known how long it waits for these
    assert set(waits[:29]) == {90 * MS}
    assert len(waits) > 50
    assert set(waits[30:]) == {None}


@pytest.mark.parametrize("seed", range(8))
def test_the_waits_are_those_of_balance(seed: int) -> None:
    """Over the same steps, where all ranks are on the node."""
    chance = random.Random(seed)
    durations = [[chance.randint(1, 99) for _ in range(3)] for _ in range(60)]
    found = steps_of(*(operations(rank, [(ns[rank] * MS, {}) for ns in durations]) for rank in range(3)))
    steps = {len(waits) for waits in found.values()}
    assert len(steps) == 1
    inside = durations[: 3 * steps.pop()]
    assert inside
    pairs = [
        Pair("0", "", rank, ns.index(min(ns)), 1, ns[rank] * MS, (ns[rank] - min(ns)) * MS)
        for ns in inside
        for rank in range(3)
    ]
    whole = len(inside) * PACE
    times = [RankTimes(n, "n", n, 1, whole, sum(ns[n] for ns in inside) * MS) for n in range(3)]
    shares = {own.rank: own.wait for own in balance(times, pairs).ranks}
    for rank, waits in found.items():
        assert sum(wait or 0 for wait in waits) / whole == pytest.approx(shares[rank] or 0)


def test_the_communicator_of_a_step_has_the_name_that_its_own_job_gave_it() -> None:
    # GIVEN jobs a and b, whose communicators have the same text, and other names
    sink = Sink("train.steps", may_lose=False)
    steps = Steps("n1", Processes(identify=identify), sink)
    rows = [*operations(0, alike(MS, comm_name="mesh_tp")), *operations(10, alike(MS, comm_name="of another user"))]
    for start in range(0, len(rows) // 2, 10):
        part = [row for row in rows if start <= row["seq"] < start + 10]
        steps.observe(operations_of(part, PAIR), PAIR)
    # THEN each says its own
    ends = {(row["pid"], row["why"].rpartition(" on ")[2]) for row in sink.rows}
    assert ends == {(0, "mesh_tp"), (10, "of another user")}
