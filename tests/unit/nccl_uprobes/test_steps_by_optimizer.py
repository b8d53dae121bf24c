"""Steps from an optimizer's calls: alone, beside operations, and from hostile records generated at random."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from test_steps_found import MS, PAIR, STEP, Call, feed, numbers, operations, processes, steps_sink

from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.steps.optimizer_steps import FOREACH, FUSED, LIST_ADD, OptimizerDetector
from probing.daemon.nccl_uprobes.steps.source import Steps

# As optimizer.bpf.c has it.
RECORD = np.dtype(
    [
        ("t", "u8"),
        ("start_ns", "u8"),
        ("before_last", "u8"),
        ("before_sign", "u8"),
        ("before_calls", "u4"),
        ("left_out", "u4"),
        ("tgid", "u4"),
        ("tid", "u4"),
        ("which", "u4"),
        ("reserved", "u4"),
    ]
)
FACTOR = 0x9E3779B97F4A7C15
LATER = ClockPair(mono_ns=1 << 62, boot_ns=1 << 62, real_ns=PAIR.real_ns + (1 << 62))
Records = npt.NDArray[Any]
# (ns since the call before, tensors)
Calls = list[tuple[int, int]]


def records(calls: Calls, which: int = FUSED, pid: int = 1, at: int = 10**9) -> Records:
    """The records that the BPF program makes of these calls."""
    found: list[tuple[int, ...]] = []
    last = sign = count = 0
    t = at
    for pause, tensors in calls:
        t += pause
        if t > last + MS:
            found.append((t, 7, last, sign, count, 0, pid, pid, which, 0))
            sign = count = 0
        last, count, sign = t, count + 1, (sign * FACTOR + tensors + 1) % (1 << 64)
    return np.array(found, RECORD)


def steps_of(seen: Records, size: int = 1000) -> list[dict[str, Any]]:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    for start in range(0, len(seen), size):
        steps.observe_optimizer(seen[start : start + size], LATER)
    return sink.rows


ONE: Calls = [(100 * MS, 40)]
GROUPS: Calls = [(100 * MS, 40), (5 * MS, 12), (3 * MS, 12)]
ALIKE: Calls = [(100 * MS, 40), (5 * MS, 40)]
CLOSE: Calls = [(100 * MS, 40), (MS // 2, 40)]
CRITIC: Calls = [(50 * MS, 8), (50 * MS, 8), (50 * MS, 8), (80 * MS, 20)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("step", "which"),
    [(ONE, FUSED), (GROUPS, FOREACH), (ALIKE, FUSED), (CLOSE, FUSED), (CRITIC, FUSED), (ONE, LIST_ADD)],
)
def test_a_repeated_sequence_is_a_step(step: Calls, which: int, size: int) -> None:
    rows = steps_of(records(step * 60, which), size)
    # The first run has no begin, and the last has not ended; the begin of a step is known after its first pause.
    assert numbers(rows) in ([*range(59)], [*range(58)], [*range(57)])
    assert {row["duration_ns"] for row in rows} == {sum(pause for pause, _ in step)}
    assert {row["source"] for row in rows} == {"optimizer_frame"}
    for row, following in pairwise(rows):
        assert row["ts"] + row["duration_ns"] == following["ts"]


def test_the_columns_of_a_step_of_the_optimizer() -> None:
    row = steps_of(records(GROUPS * 20, FOREACH))[0]
    assert row == {
        "node": "n1",
        "ts": LATER.mono_to_utc_ns + 10**9 + 108 * MS,
        "job": "job",
        "run": "run",
        "pid": 1,
        "start_ns": 7,
        "rank": 1,
        "step": 0,
        "duration_ns": 108 * MS,
        "comm_ns": None,
        "wait_ns": None,
        "ops": 0,
        "source": "optimizer_frame",
        "confidence": 0.95,
        "why": "the optimizer over lists of tensors runs once in it (3 calls)",
    }


def test_groups_that_wait_for_a_cpu_are_put_together() -> None:
    chance = random.Random(5)
    calls: Calls = []
    for _ in range(80):
        step = [(4 * MS, 40), *[(MS // 10, 12)] * 5]
        if chance.random() < 0.4:
            step[chance.randrange(1, 6)] = (8 * MS, 12)
        calls += step
    rows = steps_of(records(calls, FOREACH))
    assert numbers(rows) == [*range(len(rows))]
    assert 70 <= len(rows) <= 78
    assert max(row["duration_ns"] for row in rows) < 20 * MS


def test_a_step_with_other_calls_is_one_and_less_sure() -> None:
    rows = steps_of(records([*ONE * 20, (100 * MS, 39), *ONE * 20]))
    assert numbers(rows) == list(range(39))
    assert [row["confidence"] for row in rows].count(0.95) == 19


def test_calls_without_a_rhythm_are_no_steps() -> None:
    chance = random.Random(3)
    assert steps_of(records([(chance.randrange(2, 400) * MS, chance.randrange(1, 50)) for _ in range(300)])) == []


def test_numbers_leave_room_for_steps_that_were_missed() -> None:
    seen = records(ONE * 60)
    kept = np.concatenate((seen[:20], seen[30:]))
    kept["left_out"][20] = 10
    found = numbers(steps_of(kept))
    # The run that lay open when records were left out is not known to have ended, nor when the next step began.
    assert found == [*range(18), *range(30, 58)]


def test_repeated_records_change_nothing() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    seen = records(ONE * 40)
    for start in range(0, 40, 10):
        for _ in range(2):
            steps.observe_optimizer(seen[start : start + 10], LATER)
    assert numbers(sink.rows) == list(range(38))


def with_optimizer(step: list[Call], repeats: int, runs_in: int, runs: int = 1 << 20) -> list[dict[str, Any]]:
    """``step`` with the optimizer after each ``runs_in`` of them, fed side by side; it is seen ``runs`` times."""
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    made = operations(step * repeats, pid=1)
    ends = [row["ts"] - PAIR.real_ns + MS // 2 for row in made[len(step) * runs_in - 1 :: len(step) * runs_in]]
    seen = records([(end - begin, 40) for begin, end in pairwise([0, *ends])], at=0)[:runs]
    before = 0
    for at in range(0, len(made), 30):
        until = made[: at + 30][-1]["ts"] - PAIR.real_ns
        now = ClockPair(until, until, PAIR.real_ns + until)
        feed(steps, made[at : at + 30])
        steps.observe_optimizer(seen[(seen["t"] >= before) & (seen["t"] < until)], now)
        before = until
    return sink.rows


@pytest.mark.parametrize("runs_in", [2, 3, 8])
def test_repeats_between_two_runs_of_the_optimizer_are_micro_steps(runs_in: int) -> None:
    rows = with_optimizer(STEP, 40 * runs_in, runs_in)
    assert numbers(rows) == list(range(len(rows)))
    assert 34 <= len(rows) <= 39
    assert {row["ops"] for row in rows} == {3 * runs_in}
    assert {row["duration_ns"] for row in rows} == {102 * MS * runs_in}
    assert {(row["source"], row["confidence"]) for row in rows} == {("optimizer_frame", 0.95)}
    assert rows[0]["why"].startswith(f"the optimizer runs once in {runs_in} repeats; in each of them 3 operations")


def test_steps_go_on_as_they_were_when_the_optimizer_is_not_seen_any_more() -> None:
    rows = with_optimizer(STEP, 150, 3, runs=20)
    assert numbers(rows) == list(range(len(rows)))
    assert 38 <= len(rows) <= 49
    assert {row["ops"] for row in rows} == {9}


def test_an_optimizer_that_runs_as_often_confirms() -> None:
    rows = with_optimizer([("0", 1, 200 * MS)], 100, 1)
    assert numbers(rows) == list(range(len(rows)))
    assert {row["source"] for row in rows} == {"collective_period"}
    assert {row["why"].rpartition("; ")[2] for row in rows} == {"the optimizer runs once in each repeat"}


any_record = st.tuples(
    st.integers(0, 1 << 20),
    st.integers(0, 2),
    st.integers(0, 1 << 20),
    st.integers(0, 3),
    st.integers(0, 5) | st.just((1 << 32) - 1),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([FUSED, FOREACH, LIST_ADD, 3]),
    st.just(0),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(any_record, max_size=80), st.booleans())
def test_no_record_breaks_it(made: list[tuple[int, ...]], ordered: bool) -> None:
    seen = np.array(sorted(made) if ordered else made, RECORD)
    seen["t"] *= 1000
    seen["before_last"] *= 1000
    rows = steps_of(seen, 9)
    for row in rows:
        assert row["duration_ns"] >= 0
        assert 0 <= row["confidence"] <= 1


def test_memory_is_bounded() -> None:
    clock = OptimizerDetector()
    chance = random.Random(1)
    seen = records([(chance.randrange(2, 900) * MS, chance.randrange(1 << 30)) for _ in range(3000)])
    for record in seen:
        clock.observe([record])
    assert sum(len(stream._bursts) for stream in clock._streams.values()) <= 512
    assert not clock.promising
