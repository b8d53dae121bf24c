"""Steps from operations: sequences as of trainings with interruptions, and hostile ones generated at random."""

from __future__ import annotations

import random
import tracemalloc
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import Processes, Sink
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from operation_support import operations_of

from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.steps import period
from probing.daemon.nccl_uprobes.steps import source as steps_source
from probing.daemon.nccl_uprobes.steps.numbering import JobSteps
from probing.daemon.nccl_uprobes.steps.operation_history import OPERATION, WINDOW, History
from probing.daemon.nccl_uprobes.steps.period import Period
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals

MS = 1_000_000
PAIR = ClockPair(mono_ns=0, boot_ns=0, real_ns=1_700_000_000_000_000_000)
# (communicator, elements, pause before it in ns)
Call = tuple[str, int, int]
STEP: list[Call] = [("0", 5000, 100 * MS), ("0", 6000, MS), ("0", 7000, MS)]
NORM: list[Call] = [("0", 1, MS)]


def processes() -> Processes:
    def identify(pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job", "run", "trainer", rank=pid, world_size=2) if pid < 4 else None

    return Processes(identify=identify)


def steps_sink() -> Sink:
    return Sink("train.steps", may_lose=False)


def operations(calls: list[Call], pid: int = 0, late: int = 0, exact: bool = True) -> list[dict[str, Any]]:
    """Columns of ``comm.ops``: each operation runs for a millisecond from 0.1 ms after its call."""
    made, t = [], PAIR.real_ns + late
    for seq, (comm, count, pause) in enumerate(calls):
        t += pause
        row = {"node": "n1", "ts": t, "job": "job", "run": "run", "pid": pid, "start_ns": 7, "comm": comm, "seq": seq}
        row |= {"comm_name": "default_pg", "op": "all_reduce", "dtype": "float32", "count": count, "bytes": 4 * count}
        made.append(row | ({"start_ns_after": MS // 10, "done_hi_ns": MS + MS // 10} if exact else {}))
    return made


def feed(steps: Steps, rows: list[dict[str, Any]], size: int = 40) -> None:
    for start in range(0, len(rows), size):
        steps.observe(operations_of(rows[start : start + size], PAIR), PAIR)


def steps_of(calls: list[Call], size: int = 40) -> list[dict[str, Any]]:
    sink = steps_sink()
    feed(Steps("n1", processes(), sink), operations(calls), size)
    return sink.rows


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_the_columns_of_a_step() -> None:
    rows = steps_of([*STEP, *NORM] * 30)
    assert numbers(rows) == list(range(29))
    assert rows[0] == {
        "node": "n1",
        "ts": PAIR.real_ns + 100 * MS,
        "job": "job",
        "run": "run",
        "pid": 0,
        "start_ns": 7,
        "rank": 0,
        "step": 0,
        "duration_ns": 103 * MS,
        # 1 ms each; the last three begin when the one before is just over.
        "comm_ns": 4 * MS,
        "wait_ns": None,
        "ops": 4,
        "source": "collective_period",
        "confidence": 0.95,
        "why": "4 operations repeat (4 all_reduce of 4 sizes), from all_reduce of 5000 float32 on default_pg",
    }


def test_times_that_are_not_known_are_null() -> None:
    sink = steps_sink()
    feed(Steps("n1", processes(), sink), operations(STEP * 30, exact=False))
    assert {row["comm_ns"] for row in sink.rows} == {None}


VALIDATION: list[Call] = [*[("0", 77, MS)] * 40, ("0", 3, MS)]
LAYERS: list[Call] = [("tp", 100_000, MS)] * 256
LAYERED: list[Call] = [*[("tp", 100 + n % 3, MS) for n in range(57)], ("0", 9000, 20 * MS), ("0", 9001, MS), *NORM]
SHARDED: list[Call] = [("0", 1000 + n % 30, 20 * MS) for n in range(60)]


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        (STEP * 100, 100),
        # DDP rebuilds its buckets after the first step.
        ([("0", 9, MS)] * 10 + [("0", 18_000, 20 * MS)] + STEP * 100, 100),
        # Gradients reduced in every micro-step.
        ([*STEP * 4, *NORM] * 50, 50),
        ([*STEP * 8, *NORM] * 50, 50),
        # A loss that is logged, a validation.
        ([*STEP * 10, *NORM] * 20, 200),
        ([*STEP * 50, *NORM] * 4, 200),
        ([*STEP * 100, *VALIDATION] * 3, 300),
        # Layers, buckets of gradients, a norm.
        ([*LAYERS, ("dp", 10**7, MS), ("dp", 10**7 + 1, MS), *NORM] * 40, 40),
        ([*LAYERED * 10, ("0", 2, MS)] * 12, 120),
        # Twice the same is two steps.
        (SHARDED * 30, 60),
        # A pause, as for a checkpoint.
        ([*STEP * 60, ("0", 5000, 5000 * MS), *STEP[1:], *STEP * 60], 121),
    ],
)
def test_steps_are_counted(calls: list[Call], steps: int) -> None:
    rows = steps_of(calls)
    # The last has not ended; with equal pauses, a step may begin in the middle of one of the job's.
    assert numbers(rows) in ([*range(steps - 1)], [*range(steps - 2)])
    for row, following in pairwise(rows):
        assert row["ts"] + row["duration_ns"] == following["ts"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_batches_do_not_matter(size: int) -> None:
    assert numbers(steps_of([*STEP * 4, *NORM] * 40, size)) == list(range(39))


def test_numbers_go_on_after_a_long_validation() -> None:
    rows = steps_of(STEP * 100 + ([("0", 77, MS)] * 3000 + [("0", 3, MS)] + STEP * 100) * 2)
    assert sorted(set(numbers(rows))) == numbers(rows)
    assert numbers(rows)[-1] == 298
    first = PAIR.real_ns + 100 * MS
    again = [row for row in rows if row["step"] >= 100]
    assert again[0]["ts"] >= first + 100 * 102 * MS + 3000 * MS


def test_a_sequence_that_changes_keeps_the_numbers() -> None:
    other: list[Call] = [("0", 8000, 30 * MS), ("0", 9000, MS), ("0", 9001, MS)]
    rows = steps_of(STEP * 60 + other * 100)
    # The last step of the old sequence has no successor that would show its end.
    assert numbers(rows) == [*range(59), *range(60, 159)]
    assert rows[60]["duration_ns"] == 32 * MS


def test_operations_that_were_lost_lower_the_confidence() -> None:
    chance = random.Random(3)
    calls = [call for call in STEP * 300 if chance.random() > 0.01]
    rows = steps_of(calls)
    assert abs(numbers(rows)[-1] - 298) <= 1
    assert min(row["confidence"] for row in rows) < 0.95


def test_sizes_that_vary() -> None:
    chance = random.Random(5)
    calls: list[Call] = []
    for _ in range(200):
        calls += [("0", 500, 19 * MS), ("ep", chance.randrange(1, 10**6), MS), ("0", 700, MS)]
    rows = steps_of(calls)
    assert numbers(rows) == list(range(199))
    assert "sizes of 1 kinds vary" in rows[0]["why"]


def test_the_multiples_of_a_period_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    compare = period._compare

    def compared(signed: Any, sizes: Any, shorter: int, longer: int) -> tuple[int, bool]:
        lengths.append(longer)
        return compare(signed, sizes, shorter, longer)

    monkeypatch.setattr(period, "_compare", compared)
    # GIVEN one operation that repeats, at first with others between, so that all its multiples cover more than itself
    odd: list[Call] = [("0", n, 25 * MS) if n % 11 == 10 else ("0", 5000, 25 * MS) for n in range(500)]
    rows = steps_of([*odd, *[("0", 5000, 25 * MS)] * 1500], size=2000)
    # THEN its steps are reported without a look at each multiple
    assert numbers(rows)[-1] > 1000
    assert len(lengths) <= 16


@pytest.mark.parametrize("seed", range(3))
def test_no_period_no_steps(seed: int) -> None:
    chance = random.Random(seed)
    assert steps_of([("0", chance.choice((10, 20, 30)), MS) for _ in range(3000)]) == []
    assert steps_of([(chance.choice("abc"), chance.randrange(9999), MS) for _ in range(3000)]) == []
    assert steps_of([("0", chance.randrange(9999), MS) for _ in range(3000)]) == []


def test_too_fast_repeats_are_no_steps() -> None:
    assert steps_of([("0", 5000, 1000), ("0", 4, 1000), ("0", 9, 1000)] * 3000) == []


def test_one_operation_a_step_takes_longer_and_is_worth_less() -> None:
    one: list[Call] = [("0", 5000, 100 * MS)]
    assert steps_of(one * 50) == []
    rows = steps_of(one * 300)
    assert numbers(rows)[0] == 0
    assert {row["confidence"] for row in rows} == {0.5}


def test_ranks_agree() -> None:
    """One rank was seen later than the other, and waits for its data at another place."""
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    rows = [operations(STEP * 60), operations([("0", 5000, 2 * MS), ("0", 6000, 99 * MS), ("0", 7000, MS)] * 60, 1)]
    late = [row for row in rows[1] if row["seq"] >= 40]
    for start in range(0, 180, 30):
        for part in (rows[0], late):
            known = [row for row in part if start <= row["seq"] < start + 30]
            if known:
                steps.observe(operations_of(known, PAIR), PAIR)
    found = [{r["step"]: r["ts"] for r in sink.rows if r["rank"] == rank} for rank in range(2)]
    assert list(found[0]) == list(range(59))
    assert list(found[1]) == list(range(14, 59))
    assert all(abs(found[0][step] - found[1][step]) < 102 * MS for step in found[1])


def test_repeated_operations_change_nothing() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    rows = operations(STEP * 60)
    for start in range(0, len(rows), 25):
        part = rows[start : start + 25]
        chance = random.Random(start)
        feed(steps, part)
        feed(steps, chance.sample(part, len(part)))
    assert numbers(sink.rows) == list(range(59))


def test_operations_that_end_in_another_order() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    rows = operations(STEP * 60)
    for start in range(0, len(rows) - 6, 6):
        # The first of these six ends after the first of the next.
        early = [row for row in rows[start : start + 7] if row["seq"] % 6 != 0 or row["seq"] > start]
        feed(steps, [*early, rows[start]] if start == 0 else [*early[:-1], early[-1], rows[start]])
    assert numbers(sink.rows) == list(range(len(sink.rows)))
    assert {row["ops"] for row in sink.rows} == {3}


def test_a_process_that_ended_is_forgotten_after_its_last_records() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    rows = operations(STEP * 30)
    # GIVEN a process whose exit is heard of before its last operations and steps are read
    feed(steps, rows[:60])
    steps.process_exited(Identity(0, 7, "job", "run", "trainer"))
    steps.tick()
    feed(steps, rows[60:])
    assert numbers(sink.rows) == [*range(29)]
    # THEN it is forgotten later
    for _ in range(5):
        steps.tick()
    feed(steps, operations(STEP * 3, late=10**12))
    assert len(sink.rows) == 29


def test_jobs_that_ended_take_no_memory_but_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: weakref.WeakSet[JobSteps] = weakref.WeakSet()

    class Counted(JobSteps):
        def __init__(self) -> None:
            super().__init__()
            jobs.add(self)

    monkeypatch.setattr(steps_source, "JobSteps", Counted)

    def identify(pid: int, start_ns: int) -> Identity:
        # The first process and the last one are of one job.
        return Identity(pid, start_ns, f"job {pid % 20}", "run", "trainer", rank=0, world_size=2)

    # GIVEN a node on which one job after the other runs and ends
    sink = steps_sink()
    steps = Steps("n1", Processes(identify=identify), sink)
    feed(steps, operations(STEP * 30, pid=20))
    for pid in range(1, 20):
        feed(steps, operations(STEP * 2, pid=pid))
        steps.forget(pid, 7)
    assert len(jobs) <= 10
    # THEN a job that runs keeps its numbers
    feed(steps, operations(STEP * 30, pid=0))
    assert [numbers([row for row in sink.rows if row["pid"] == pid]) for pid in (0, 20)] == [[*range(29)]] * 2


def test_the_last_steps_that_a_job_reports_are_read_after_its_exit() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    steps.observe_metric(metric(PAIR.real_ns, 1, name="step"), PAIR)
    steps.process_exited(Identity(0, 7, "job", "run", "trainer"))
    steps.observe_metric(metric(PAIR.real_ns + MS, 2, name="step"), PAIR)
    assert [(row["step"], row["source"]) for row in sink.rows] == [(1, "span")]


def owned(pid: int, start_ns: int) -> Identity:
    """The first hundred processes are of one user, the others of another."""
    return Identity(pid, start_ns, f"job {pid // 100}", "run", "trainer", rank=pid, world_size=9, owner=pid // 100)


def test_a_job_with_more_ranks_than_have_room_has_the_steps_of_those_that_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_source, "_MAX_PROCESSES", 4)
    sink = steps_sink()
    steps = Steps("n1", Processes(identify=owned), sink)
    ranks = [operations(STEP * 60, pid=pid) for pid in range(6)]
    # GIVEN more ranks than have room, which all call operations all the time
    for start in range(0, 90, 15):
        steps.observe(operations_of([row for rank in ranks for row in rank[start : start + 15]], PAIR), PAIR)
    # THEN those that came first have their steps
    assert {row["pid"] for row in sink.rows} == {0, 1, 2, 3}
    (state,) = steps.states(Totals("running", {}, {}))
    assert state.reason == "some processes have no steps: 4 other processes have data"
    # and another user's process gets a place,
    feed(steps, operations(STEP * 30, pid=100))
    assert numbers([row for row in sink.rows if row["pid"] == 100]) == [*range(29)]
    # as does another rank once one of them is silent.
    later = PAIR._replace(mono_ns=120 * 10**9, real_ns=PAIR.real_ns + 120 * 10**9)
    for start in range(90, 180, 15):
        steps.observe(operations_of([row for rank in ranks[2:] for row in rank[start : start + 15]], later), later)
    assert {5, 4} & {row["pid"] for row in sink.rows}


def test_a_job_with_long_patterns_takes_little_memory() -> None:
    job, one = JobSteps(), np.arange(1_000)
    tracemalloc.start()
    # WHEN a job has many long patterns
    for count in range(20):
        pattern = Period(one.astype(np.uint64), one, one + count, one[:0], repeats=9, inner=1, enclosing=0)
        assert job.turn(pattern.rotated(7)).counts[0] == job.turn(pattern).counts[0]
    # THEN only a few bytes are kept of each, not 100 for each operation
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 500_000


def test_ranks_begin_a_period_alike_however_many_periods_the_job_has() -> None:
    job, one = JobSteps(), np.arange(7)

    def pattern(number: int) -> Period:
        return Period(one.astype(np.uint64), one, one + number, one[:0], repeats=9, inner=1, enclosing=0)

    # GIVEN a job with as many periods as are remembered, of which the first rank begins one with its third operation
    begun = job.turn(pattern(0).rotated(2))
    for number in range(1, 64):
        job.turn(pattern(number))
    # WHEN its ranks find the last one, one after the other
    for _ in range(64):
        job.turn(pattern(63))
    # THEN the others of them begin the first one as that rank does
    assert job.turn(pattern(0)).counts.tolist() == begun.counts.tolist()


def test_a_process_takes_little_more_memory_than_its_operations() -> None:
    history, part = History(), np.zeros(1_000, OPERATION)
    tracemalloc.start()
    for begin in range(0, 4 * WINDOW, len(part)):
        part["t"] = np.arange(begin, begin + len(part))
        history.add(part)
        assert history.operations["t"][-1] == begin + len(part) - 1
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert WINDOW <= len(history.operations) < 1.3 * WINDOW
    assert kept < 1.3 * WINDOW * OPERATION.itemsize


def metric(ts: int, step: int | None, pid: int = 0, name: str | None = None) -> pa.RecordBatch:
    row = {"node": "n1", "ts": ts, "pid": pid, "start_ns": 7, "step": step, "name": name}
    return batch_of("python.training_metrics", [row])


def test_a_variable_names_the_steps() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    rows = operations(STEP * 100)
    for start in range(0, len(rows), 30):
        feed(steps, rows[start : start + 30])
        # Read in the middle of step 10, 20, ...: the job calls them 1010, 1020, ...
        steps.observe_metric(metric(rows[start]["ts"] + 10 * MS, 1000 + start // 3), PAIR)
    by_source = {name: [r for r in sink.rows if r["source"] == name] for name in ("collective_period", "variable")}
    assert numbers(by_source["collective_period"]) == list(range(len(by_source["collective_period"])))
    named = numbers(by_source["variable"])
    assert named == list(range(named[0], 1099))
    assert all(row["ts"] == rows[3 * (row["step"] - 1000)]["ts"] for row in by_source["variable"])
    assert by_source["variable"][0]["why"].startswith("counted by the variable step; 3 operations repeat")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_at_the_end_of_64_bits_costs_no_rows(sign: int) -> None:
    # GIVEN a job that counts its steps up to the largest number, or from the smallest
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    both = [operations(STEP * 100), operations(STEP * 100, pid=1)]
    for start in range(0, 300, 30):
        steps.observe(operations_of([*both[0][start : start + 30], *both[1][start : start + 30]], PAIR), PAIR)
        value = max(min(sign * 2**63 - sign * 60 + start // 3, 2**63 - 1), -(2**63))
        steps.observe_metric(metric(both[0][start]["ts"] + 10 * MS, value), PAIR)
    # THEN its number is not believed, and no row of any rank is missing
    assert [numbers([row for row in sink.rows if row["pid"] == pid]) for pid in (0, 1)] == [[*range(99)]] * 2


def test_a_variable_alone() -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    for second, value in enumerate((7, 8, None, 9, 30, 31)):
        steps.observe_metric(metric(PAIR.real_ns + second * 10**9, value), PAIR)
    # How long each of 9 to 29 took is not known.
    assert [(r["step"], r["duration_ns"], r["source"]) for r in sink.rows] == [
        (7, 10**9, "variable"),
        (8, 2 * 10**9, "variable"),
        (30, 10**9, "variable"),
    ]


@pytest.mark.parametrize("name", ["step", None])
def test_a_step_does_not_end_before_it_begins(name: str | None) -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    # WHEN a job reports a step with a time before that of the step before it
    for second, value in ((10, 1), (20, 2), (15, 3), (30, 3), (40, 4)):
        steps.observe_metric(metric(PAIR.real_ns + second * 10**9, value, name=name), PAIR)
    # THEN the steps follow each other as without it
    begins = [(row["step"], (row["ts"] - PAIR.real_ns) // 10**9, row["duration_ns"] // 10**9) for row in sink.rows]
    assert begins == [(1, 10, 10), (2, 20, 10), (3, 30, 10)]


numbers_by_chance = st.one_of(st.none(), st.integers(-(2**62), 2**62), st.integers(0, 9))
hostile = st.fixed_dictionaries(
    {
        "ts": st.integers(0, 2**62),
        "pid": st.integers(0, 5),
        "start_ns": st.integers(0, 2),
        "comm": st.sampled_from(["0", "1", None]),
        "op": st.sampled_from(["all_reduce", "broadcast", "odd", None]),
        "count": numbers_by_chance,
        "bytes": numbers_by_chance,
        "seq": numbers_by_chance,
        "start_ns_after": numbers_by_chance,
        "done_hi_ns": numbers_by_chance,
        "done_hi": st.none() | st.integers(0, 2**62),
    }
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(hostile, max_size=12), max_size=4), st.integers(1, 12))
def test_hostile_operations_are_taken(parts: list[list[dict[str, Any]]], times: int) -> None:
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    for part in parts:
        if part:
            steps.observe(operations_of(part * times, PAIR), PAIR)
    assert all(row["ops"] > 0 and 0 <= row["confidence"] <= 1 for row in sink.rows)


@pytest.mark.parametrize("heard", [0, 12])
def test_a_program_that_reports_no_steps_after_one_that_did_has_steps_of_its_own(heard: int) -> None:
    # GIVEN a program that reports its steps, and then calls exec
    sink = steps_sink()
    steps = Steps("n1", processes(), sink)
    for value in range(3):
        steps.observe_metric(metric(PAIR.real_ns + value * MS, value, name="step"), PAIR)
    assert {row["source"] for row in sink.take("train.steps")} == {"span"}
    rows = operations(STEP * 30, late=1_000 * MS)
    # WHEN the new program reports none; its first operations may come before the exec is heard of
    feed(steps, rows[:heard])
    steps.program_ended(0, 7, 900 * MS)
    feed(steps, rows[heard:])
    # THEN its collectives show them
    assert {row["source"] for row in sink.rows} == {"collective_period"}
    assert len(sink.rows) == 29
