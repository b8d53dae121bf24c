"""Slow ranks: who is named by which arrivals, never a rank that waits, with clocks apart and operations dropped."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from diagnosis_cases import WORLD, comm, facts, frame, history, node, op, rank, shifted
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.diagnosis.arrivals import arrivals
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Condition, Facts, Helper, Operation, Rank, Sample
from probing.diagnosis.rules.slow_rank import find
from probing.diagnosis.verdict import Finding

STEP_S = 0.1
TRANSFER_S = 0.002


class Job:
    """Ranks that compute and then meet in collectives. ``now`` is the time of each, s from the start."""

    def __init__(self, ranks: int, seed: int = 7) -> None:
        self.now = [0.0] * ranks
        self.calls: list[list[tuple[str, int, str, float, float]]] = [[] for _ in range(ranks)]
        self._seqs: dict[str, int] = {}
        self._rng = random.Random(seed)

    def compute(self, number: int, seconds: float, jitter: float = 0.0) -> None:
        self.now[number] += seconds * (1 + self._rng.uniform(-jitter, jitter))

    def meet(self, members: list[int], name: str = WORLD, op_name: str = "all_reduce") -> None:
        self._seqs[name] = seq = self._seqs.get(name, 0) + 1
        end = max(self.now[m] for m in members) + TRANSFER_S
        for m in members:
            ended = end + self._rng.uniform(0, 0.0002)
            self.calls[m].append((name, seq, op_name, self.now[m], ended))
            self.now[m] = ended

    def operations(self, number: int, dropped: float = 0.0, last: int = 64) -> list[Operation]:
        end = max(self.now)
        kept = self.calls[number][-last:]
        return [
            op(seq, op_name, ago=end - called, took=ended - called, comm=name)
            for name, seq, op_name, called, ended in kept
            if self._rng.random() >= dropped
        ]


def data_parallel(ranks: int, slow: dict[int, float], steps: int = 40, jitter: float = 0.05, seed: int = 7) -> Job:
    """Ranks that compute 0.1 s a step, and those in ``slow`` so many times as long."""
    job = Job(ranks, seed)
    for _ in range(steps):
        for number in range(ranks):
            job.compute(number, STEP_S * slow.get(number, 1.0), jitter)
        job.meet(list(range(ranks)))
    return job


def facts_of(job: Job, nodes: str = "", dropped: float = 0.0, **fields: object) -> Facts:
    nodes = nodes or "a" * len(job.now)
    ranks = [rank(n, *job.operations(n, dropped), node=nodes[n]) for n in range(len(job.now))]
    return facts(*ranks, **fields)  # type: ignore[arg-type]


def found_in(made: Facts) -> list[Finding]:
    return list(find(Case(made)))


def culprits(made: Facts) -> list[int]:
    return [c.rank for finding in found_in(made) for c in finding.culprits]


def test_lag_is_the_call_less_the_median_of_the_others() -> None:
    ops = [[op(1, ago=1 - 0.01 * n, took=0.1)] for n in (0, 0, 3)]
    (one,) = arrivals(Case(facts(*(rank(n, *own) for n, own in enumerate(ops)))))
    assert one.lag_ns.round(-3).tolist() == [[-15e6, -15e6, 30e6]]
    assert (one.ranks, one.seqs.tolist(), one.error_ns) == ((0, 1, 2), [1], 0)


def test_operations_of_fewer_than_half_of_the_members_are_left_out() -> None:
    ranks = [rank(0, op(1, ago=9, took=1), op(2, ago=5, took=1)), rank(1, op(2, ago=5, took=1))]
    made = facts(*ranks, comms=[comm(WORLD, [0, 1, 2, 3])])
    assert [a.seqs.tolist() for a in arrivals(Case(made))] == [[2]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_one_slow_rank_is_named(ranks: int) -> None:
    (finding,) = found_in(facts_of(data_parallel(ranks, {1: 1.5})))
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.victims == tuple(n for n in range(ranks) if n != 1)
    assert finding.severity == "warning"
    assert finding.sentence.startswith("rank 1 (node a, pid 4001) slows ")
    assert "3 ranks by 34%" in finding.sentence or ranks != 4
    assert finding.evidence[0].startswith("rank 1 was the last in 40 of 40 operations of default_pg")


def test_two_slow_ranks_are_named_and_a_little_slow_one_is_not() -> None:
    assert culprits(facts_of(data_parallel(8, {2: 1.6, 5: 1.55, 6: 1.12}))) == [2, 5]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_equal_ranks_that_take_turns_in_being_last_are_healthy(ranks: int, seed: int) -> None:
    assert found_in(facts_of(data_parallel(ranks, {}, jitter=0.4, seed=seed))) == []


def test_a_rank_that_is_fast_makes_nobody_slow() -> None:
    assert found_in(facts_of(data_parallel(4, {0: 0.4}, jitter=0.01))) == []


def test_most_ranks_being_slow_is_not_theirs() -> None:
    assert found_in(facts_of(data_parallel(4, {0: 2, 1: 2, 2: 2}, jitter=0.01))) == []


def test_nineteen_operations_are_too_few() -> None:
    assert culprits(facts_of(data_parallel(4, {1: 2.0}, steps=19))) == []
    assert culprits(facts_of(data_parallel(4, {1: 2.0}, steps=20))) == [1]


def test_one_long_pause_is_no_slow_rank() -> None:
    job = data_parallel(4, {}, steps=30)
    job.compute(0, 6.0)
    for _ in range(10):
        for n in range(4):
            job.compute(n, STEP_S, 0.05)
        job.meet([0, 1, 2, 3])
    assert found_in(facts_of(job)) == []


def test_a_rank_that_was_slow_and_is_not_any_more() -> None:
    job = data_parallel(4, {1: 2.0}, steps=40)
    for _ in range(24):
        for n in range(4):
            job.compute(n, STEP_S, 0.02)
        job.meet([0, 1, 2, 3])
    assert found_in(facts_of(job)) == []


def test_operations_that_all_have_just_left_together_do_not_hide_it() -> None:
    job = Job(4)
    for _ in range(30):
        for n in range(4):
            job.compute(n, STEP_S * (1.5 if n == 3 else 1.0), 0.02)
        job.meet([0, 1, 2, 3])
        job.meet([0, 1, 2, 3], op_name="barrier")
    assert culprits(facts_of(job)) == [3]


def grid(slow: int, steps: int = 40, seed: int = 7) -> Job:
    """Pairs (0, 1) and (2, 3) exchange four times a step, then (0, 2) and (1, 3) do."""
    job = Job(4, seed)
    for _ in range(steps):
        for _ in range(4):
            for n in range(4):
                job.compute(n, STEP_S / 4 * (1.8 if n == slow else 1.0), 0.02)
            job.meet([0, 1], "tp0")
            job.meet([2, 3], "tp1")
        job.meet([0, 2], "dp0")
        job.meet([1, 3], "dp1")
    return job


GRID = [comm("tp0", [0, 1]), comm("tp1", [2, 3]), comm("dp0", [0, 2]), comm("dp1", [1, 3])]


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("dropped", [0.0, 0.2])
def test_a_rank_that_waits_for_the_slow_one_in_another_group_is_its_victim(slow: int, dropped: float) -> None:
    job = grid(slow)
    ranks = [rank(n, *job.operations(n, dropped, last=5 * 40)) for n in range(4)]
    assert culprits(facts(*ranks, comms=GRID)) == [slow]


def test_a_pipeline_stage_that_waits_for_its_input_is_a_victim() -> None:
    job = Job(4)
    for step in range(40):
        for first, second in ((0, 1), (2, 3)):
            job.compute(first, STEP_S * (1.8 if first == 0 else 1.0), 0.02)
            start = job.now[second]
            end = max(start, job.now[first]) + TRANSFER_S
            job.calls[second].append((f"p2p{first}", step, "recv", start, end))
            job.now[second] = end
            job.compute(second, STEP_S / 10)
        job.meet([0, 2], "dp0")
        job.meet([1, 3], "dp1")
    ranks = [rank(n, *job.operations(n, last=200)) for n in range(4)]
    made = facts(*ranks, comms=[comm("dp0", [0, 2]), comm("dp1", [1, 3]), comm("p2p0", [0, 1]), comm("p2p2", [2, 3])])
    assert culprits(made) == [0]


def test_a_job_that_stands_still_or_died_has_no_slow_rank() -> None:
    made = facts_of(data_parallel(4, {1: 2.0}))
    old = replace(made, nodes=tuple(replace(n, taken_ns=n.taken_ns + 60 * 10**9) for n in made.nodes))
    assert found_in(old) == []


def test_lost_operations_and_unseen_ranks_lower_the_confidence() -> None:
    job = data_parallel(4, {1: 2.0})
    ranks = [rank(n, *job.operations(n), lost=7 if n == 2 else 0) for n in range(3)]
    (finding,) = found_in(facts(*ranks, comms=[comm(WORLD, range(4))]))
    (whole,) = found_in(facts_of(job))
    assert finding.confidence < whole.confidence
    assert finding.missing[:2] == ("7 operations were lost", "1 of 4 ranks of default_pg are not seen")


def test_hosts_that_run_ahead_of_their_gpus_lower_the_confidence() -> None:
    job = data_parallel(4, {1: 2.0})
    ranks = [rank(n, *job.operations(n)) for n in range(4)]
    (finding,) = found_in(facts(*ranks, comms=[comm(WORLD, range(4), backend="nccl")]))
    assert finding.confidence <= 0.6


@settings(deadline=None, max_examples=examples(60))
@given(
    ranks=st.sampled_from((2, 4, 8)),
    slow=st.integers(0, 7),
    factor=st.sampled_from((1.0, 1.05, 1.3, 2.0)),
    apart=st.lists(st.sampled_from((0.0, 0.05, -0.05, 5.0, -5.0)), min_size=8, max_size=8),
    jitter=st.sampled_from((0.02, 0.1, 0.5)),
    seed=st.integers(0, 1 << 30),
)
def test_never_another_rank_with_clocks_apart_and_a_fifth_of_the_operations_dropped(
    ranks: int, slow: int, factor: float, apart: list[float], jitter: float, seed: int
) -> None:
    slow %= ranks
    job = data_parallel(ranks, {slow: factor}, jitter=jitter, seed=seed)
    seen = [shifted(rank(n, *job.operations(n, 0.2), node="abcdefgh"[n]), apart[n] if n else 0.0) for n in range(ranks)]
    named = culprits(facts(*seen, nodes=[node(r.node, [seen[0]]) for r in seen]))
    assert named in ([], [slow])
    if factor == 2.0 and jitter < 0.5 and ranks > 2:
        assert named == [slow]


@settings(deadline=None, max_examples=examples(40))
@given(slow=st.integers(0, 3), seed=st.integers(0, 1 << 30), apart=st.sampled_from((0.05, 5.0, -5.0)))
def test_never_a_victim_of_another_group(slow: int, seed: int, apart: float) -> None:
    job = grid(slow, 30, seed)
    seen = [rank(n, *job.operations(n, 0.2, last=150), node="ab"[n // 2]) for n in range(4)]
    seen = [r if r.node == "a" else shifted(r, apart) for r in seen]
    assert culprits(facts(*seen, comms=GRID, nodes=[node("a", seen[:1]), node("b", seen[:1])])) in ([], [slow])


# Why a rank is slow.

FORWARD, AUGMENT = frame("forward model.py:9"), frame("augment data.py:33")
LOOP, WAIT = frame("train train.py:40"), frame("all_reduce /x/torch/distributed/distributed_c10d.py:3252")


def samples(**shares: float) -> tuple[Sample, ...]:
    stacks = {"forward": (FORWARD, LOOP), "augment": (AUGMENT, LOOP), "wait": (WAIT, LOOP), "sleep": (LOOP,)}
    return tuple(Sample(stacks[name], share, name not in ("wait", "sleep")) for name, share in shares.items())


def job_with(slow: dict[str, object], peer: dict[str, object]) -> Finding:
    job = data_parallel(4, {1: 1.6})
    ranks = [rank(n, *job.operations(n), **(slow if n == 1 else peer)) for n in range(4)]
    (finding,) = found_in(facts(*ranks))
    return finding


def condition(**fields: object) -> Condition:
    return replace(Condition(interval_ns=10**10, throttled_ns=0, run_delay_ns=10**8), **fields)  # type: ignore[arg-type]


def test_slow_host_code_is_named_with_its_line_and_share() -> None:
    finding = job_with(
        {"samples": samples(forward=0.55, augment=0.41)}, {"samples": samples(forward=0.55, augment=0.03, wait=0.4)}
    )
    (culprit,) = finding.culprits
    assert culprit.activity == "computing"
    assert culprit.why == "it computes in augment, data.py:33, 41% of the time; the others 3%"
    assert finding.sentence.endswith(f": {culprit.why}")


def test_a_sleep_in_the_same_function_differs_by_its_line() -> None:
    slow = (*samples(forward=0.5), Sample((frame("train train.py:44"),), 0.45, False))
    finding = job_with({"samples": slow}, {"samples": samples(forward=0.5, wait=0.45)})
    assert finding.culprits[0].why == "it is blocked in train, train.py:44, 45% of the time; the others 0%"
    assert finding.culprits[0].activity == "sleeping"


def test_another_caller_of_the_usual_code_is_no_reason() -> None:
    caller, idle = frame("augmented train.py:34"), frame("augment data.py:29")
    slow = (Sample((FORWARD, caller, LOOP), 0.6, True), Sample((idle, caller, LOOP), 0.34, False))
    finding = job_with({"samples": slow}, {"samples": samples(forward=0.6, wait=0.4)})
    assert finding.culprits[0].why == "it is blocked in augment, data.py:29, 34% of the time; the others 0%"


def test_a_sample_that_shows_only_the_outermost_frame_does_not_make_it_the_reason() -> None:
    slow = (*samples(forward=0.5, augment=0.4), Sample((LOOP,), 0.04, False))
    finding = job_with({"samples": slow}, {"samples": samples(forward=0.5, wait=0.5)})
    assert finding.culprits[0].why == "it computes in augment, data.py:33, 40% of the time; the others 0%"


def test_time_without_a_cpu_is_no_wait_of_the_code() -> None:
    # Half of the samples of `forward` are off the CPU, as another rank runs there.
    waits = Sample((FORWARD, LOOP), 0.5, False)
    finding = job_with(
        {"samples": (*samples(forward=0.3), waits), "condition": condition(cpu_ns=3 * 10**9, run_delay_ns=4 * 10**9)},
        {
            "samples": (*samples(forward=0.15, augment=0.1, wait=0.55), replace(waits, share=0.2)),
            "condition": condition(cpu_ns=15 * 10**8, run_delay_ns=2 * 10**9),
        },
    )
    assert finding.culprits[0].why.startswith("uneven work: it is busy 80% of the time, the others 45%")


def test_reading_is_io() -> None:
    slow = (*samples(forward=0.5), Sample((frame("shard data.py:7"), LOOP), 0.45, False))
    finding = job_with(
        {"samples": slow, "condition": condition(read_bytes=1 << 30)},
        {"samples": samples(forward=0.5, wait=0.45), "condition": condition()},
    )
    assert (finding.culprits[0].activity, finding.culprits[0].why[:38]) == (
        "disk_io",
        "it waits for I/O in shard, data.py:7, ",
    )


def test_a_slow_data_loader() -> None:
    queue = frame("get /usr/lib/python3.11/queue.py:180")
    loader = frame("_next_data /x/torch/utils/data/dataloader.py:700")
    slow = (*samples(forward=0.5), Sample((queue, loader, LOOP), 0.45, False))
    finding = job_with({"samples": slow}, {"samples": samples(forward=0.5, wait=0.45)})
    assert finding.culprits[0].activity == "data_loader"


def test_throttling_comes_before_the_stacks_it_changes() -> None:
    finding = job_with(
        {
            "samples": samples(augment=0.9),
            "condition": condition(throttled_ns=6 * 10**9, cpu_quota=0.5, cgroup="/slow"),
        },
        {"samples": samples(forward=0.5), "condition": condition()},
    )
    (culprit,) = finding.culprits
    assert (culprit.activity, culprit.why) == ("throttled", "its cgroup throttles it to 0.5 CPUs, 60% of the time")
    assert "cgroup /slow" in finding.evidence


def test_throttling_that_all_ranks_share_is_not_why_one_is_slow() -> None:
    finding = job_with(
        {"samples": samples(forward=0.9), "condition": condition(throttled_ns=10**9)},
        {"samples": samples(forward=0.5, wait=0.4), "condition": condition(throttled_ns=10**9)},
    )
    assert finding.culprits[0].why.startswith("uneven work")


def test_a_neighbour_on_its_cpu_is_named() -> None:
    rival = (("stress", 77, 5 * 10**9),)
    finding = job_with(
        {"condition": condition(run_delay_ns=5 * 10**9, neighbours=rival, cpu_list="3")}, {"condition": condition()}
    )
    assert finding.culprits[0].why == "it waits for a CPU 50% of the time: stress (pid 77) runs there"
    assert "ready to run and without a CPU on CPUs 3 50% of the time; the others 1%" in finding.evidence


def crowded(own: dict[str, object], idle: tuple[int, ...] | None, **slow: object) -> Finding:
    """Rank 1 waits for a CPU half of the time, on a node of 4 CPUs; ``own``: the rest of its condition."""
    job, waits = data_parallel(4, {1: 1.6}), condition(run_delay_ns=5 * 10**9, **own)
    ranks = [
        replace(rank(n, *job.operations(n), condition=condition(cpus_allowed=4, cpu_list="0-3")), **slow_of)  # type: ignore[arg-type]
        for n in range(4)
        for slow_of in [{"condition": waits, **slow} if n == 1 else {}]
    ]
    (finding,) = found_in(facts(*ranks, nodes=[replace(node("a", ranks), idle_cpus=idle)]))
    return finding


ONE_CPU: dict[str, object] = {"cpus_allowed": 1, "cpu_list": "3"}


def worker(pid: int, **fields: object) -> Helper:
    return Helper(pid, 1, "data_loader", "R", condition=condition(**ONE_CPU, **fields))


def test_workers_that_share_the_cpu_of_their_rank_are_named() -> None:
    rival = (("python", 78, 5 * 10**9), ("python", 4000, 10**9), ("stress", 9, 10**9))
    finding = crowded({**ONE_CPU, "neighbours": rival}, (0, 2), helpers=(worker(77), worker(78)))
    assert finding.culprits[0].why == (
        "it waits for a CPU 50% of the time: it shares CPU 3 with 2 data-loader workers of rank 1, while 2 other CPUs"
        " of the node are free"
    )
    # Who takes the CPU, by what it is in the job.
    assert "a data-loader worker of rank 1 (python, pid 78) uses 50% of a CPU" in finding.evidence
    assert "rank 0 (python, pid 4000) uses 10% of a CPU" in finding.evidence
    assert "stress (pid 9) uses 10% of a CPU" in finding.evidence
    assert finding.next_steps[0].startswith("Give each rank and its workers CPUs of their own")


def test_own_threads_that_share_the_cpu_are_named() -> None:
    finding = crowded({**ONE_CPU, "cpu_ns": 3 * 10**9, "process_cpu_ns": 9 * 10**9}, (0,))
    assert finding.culprits[0].why == (
        "it waits for a CPU 50% of the time: it shares CPU 3 with its own other threads, which use 60% of it, while"
        " 1 other CPU of the node is free"
    )


@pytest.mark.parametrize(
    ("own", "idle", "workers"),
    [
        (ONE_CPU, (), 2),  # no CPU is free
        (ONE_CPU, None, 2),
        (ONE_CPU, (3,), 2),  # its own one is idle
        (ONE_CPU, (0, 1), 0),  # it has its CPU for itself
        ({"cpus_allowed": 9, "cpu_list": "0-3"}, (5, 6), 2),  # a list that was cut
        ({"cpus_allowed": 1, "cpu_list": "what-ever"}, (5, 6), 2),
        ({"cpus_allowed": 3, "cpu_list": "1-3"}, (0,), 2),  # three CPUs for three
    ],
)
def test_affinity_is_no_reason_without_a_crowd_or_without_a_free_cpu(
    own: dict[str, object], idle: tuple[int, ...] | None, workers: int
) -> None:
    finding = crowded(own, idle, helpers=tuple(worker(77 + n) for n in range(workers)))
    assert "shares" not in finding.culprits[0].why


def test_a_slow_loader_whose_workers_share_a_cpu() -> None:
    queue = frame("get /usr/lib/python3.11/queue.py:180")
    loader = frame("_next_data /x/torch/utils/data/dataloader.py:700")
    slow = (*samples(forward=0.5), Sample((queue, loader, LOOP), 0.45, False))
    workers = tuple(worker(pid, run_delay_ns=6 * 10**9) for pid in (77, 78))
    job = data_parallel(4, {1: 1.6})
    own: dict[str, object] = {"samples": slow, "helpers": workers, "condition": condition(**ONE_CPU)}
    peer: dict[str, object] = {"samples": samples(forward=0.5, wait=0.45), "condition": condition()}
    ranks = [rank(n, *job.operations(n), **(own if n == 1 else peer)) for n in range(4)]
    (finding,) = found_in(facts(*ranks, nodes=[replace(node("a", ranks), idle_cpus=(0, 1))]))
    assert finding.culprits[0].activity == "data_loader"
    assert finding.culprits[0].why.endswith(
        "worker 77 waits for a CPU 60% of the time: it shares CPU 3 with rank 1 and a data-loader worker of rank 1,"
        " while 2 other CPUs of the node are free"
    )


def test_a_rank_that_computes_more_on_a_busy_node_is_uneven_work() -> None:
    finding = job_with(
        {"samples": samples(forward=0.9), "condition": condition(cpu_ns=6 * 10**9, run_delay_ns=27 * 10**8)},
        {"samples": samples(forward=0.3, wait=0.6), "condition": condition(cpu_ns=2 * 10**9, run_delay_ns=12 * 10**8)},
    )
    assert finding.culprits[0].why.startswith("uneven work: it is busy 90% of the time, the others 30%")


def test_swapping() -> None:
    finding = job_with({"condition": condition(major_faults=9_000, swap_bytes=1 << 30)}, {"condition": condition()})
    assert finding.culprits[0].why == "its memory is swapped out, 900 major faults a second"


def test_more_of_the_same_code_is_uneven_work() -> None:
    finding = job_with(
        {"samples": samples(forward=0.8, augment=0.16), "condition": condition()},
        {"samples": samples(forward=0.5, augment=0.1, wait=0.37), "condition": condition()},
    )
    (culprit,) = finding.culprits
    assert culprit.activity == "computing"
    assert culprit.why == "uneven work: it is busy 96% of the time, the others 60%, in the same code"
    assert finding.confidence == 0.9


def test_a_bigger_batch_changes_the_parts_of_a_step_and_is_uneven_work_too() -> None:
    idle = Sample((frame("forward model.py:12"), LOOP), 0.27, False)
    finding = job_with(
        {"samples": (*samples(forward=0.72), idle), "condition": condition()},
        {"samples": (*samples(forward=0.18, wait=0.55), idle), "condition": condition()},
    )
    (culprit,) = finding.culprits
    assert culprit.why == (
        "uneven work: it is busy 99% of the time, the others 45%, in the same code, most of it in forward, model.py:9"
    )


def test_without_stacks_and_conditions_the_reason_is_unknown_and_said_to_be_missing() -> None:
    finding = job_with({}, {})
    assert finding.culprits[0].why == "nothing that was recorded shows why"
    assert finding.missing == ("samples of rank 1", "state in the kernel of rank 1")
    assert finding.confidence == 0.75


def test_open_operations_are_no_arrivals() -> None:
    assert arrivals(Case(facts(rank(0, *history(5, ago=1), op(6, ago=1)), rank(1)))) == []


def test_ranks_without_operations() -> None:
    assert found_in(facts(rank(0), rank(1), Rank(2, "a", 7, 7))) == []


def pipeline(slow: dict[int, float]) -> Facts:
    """Two stages over gloo, which counts sends and receives: stage 0 sends 3 tensors a step, each in two parts."""
    rng = random.Random(7)
    now, seqs = [0.0, 0.0], [0, 0]
    calls: list[list[tuple[int, str, float, float]]] = [[], []]

    def call(number: int, name: str, began: float, ended: float) -> None:
        seqs[number] += 1
        calls[number].append((seqs[number], name, began, ended))
        now[number] = ended

    for _ in range(24):
        for number in (0, 1):
            now[number] += STEP_S * slow.get(number, 1.0) * (1 + rng.uniform(-0.05, 0.05))
        for name in ("send", "send"):
            call(0, name, now[0], now[0] + 0.001)
        call(1, "recv", now[1], max(now) + 0.001)
        end = max(now) + TRANSFER_S
        for number in (0, 1):
            call(number, "all_reduce", now[number], end + rng.uniform(0, 0.0002))
    end = max(now)
    own = [[op(s, name, ago=end - b, took=e - b) for s, name, b, e in of] for of in calls]
    return facts(*(rank(number, *ops, node="ab"[number]) for number, ops in enumerate(own)))


def test_sends_that_gloo_counts_make_no_rank_of_a_pipeline_slow() -> None:
    assert culprits(pipeline({})) == []
    assert culprits(pipeline({1: 2.0})) == [1]


def test_sends_before_the_first_recorded_operation_leave_collectives_uncompared() -> None:
    whole = pipeline({})
    late = [replace(one, done=one.done[2:]) for one in whole.ranks]
    assert culprits(replace(whole, ranks=tuple(late))) == []
    assert arrivals(Case(replace(whole, ranks=tuple(late)))) == []
