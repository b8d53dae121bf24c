"""Lateness that moves between ranks, and lateness that is over: notes, and nobody to blame."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from diagnosis_cases import facts, node, rank
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from test_slow_ranks import Job

from probing.diagnosis.facts import Condition, Facts
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import NOTE, Finding


def stepping(work: list[list[float]], nodes: str = "a") -> Facts:
    """Ranks that compute for ``work[step][rank]`` s, and then meet."""
    size = len(work[0])
    job = Job(size)
    for step in work:
        for number, seconds in enumerate(step):
            job.compute(number, seconds)
        job.meet(list(range(size)))
    ranks = [rank(n, *job.operations(n), node=nodes[n % len(nodes)]) for n in range(size)]
    return facts(*ranks)


def slow_at(steps: int, size: int, slow: dict[int, int], factor: float = 2.0) -> list[list[float]]:
    """0.1 s of work for each rank and step; ``slow``: by step the rank that has ``factor`` as much."""
    return [[0.1 * (factor if slow.get(step) == n else 1.0) for n in range(size)] for step in range(steps)]


def found(given: Facts) -> list[Finding]:
    return list(diagnose(given).findings)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_straggler_that_rotates_is_uneven_data(size: int) -> None:
    (finding,) = found(stepping(slow_at(48, size, {step: step % size for step in range(48)})))
    assert (finding.verdict.id, finding.severity, finding.culprits) == ("rotating_straggler", NOTE, ())
    assert finding.victims == tuple(range(size))
    assert f"time of {size} ranks: uneven data, no slow rank" in finding.sentence
    assert "by 100 ms, which costs " in finding.sentence


def test_ranks_that_wait_for_a_cpu_are_not_said_to_have_uneven_data() -> None:
    job = stepping(slow_at(48, 4, {step: step % 4 for step in range(48)}))
    waits = Condition(interval_ns=10**10, run_delay_ns=3 * 10**9)
    (finding,) = found(replace(job, ranks=tuple(replace(one, condition=waits) for one in job.ranks)))
    assert "they wait for a CPU 30% of the time, no slow rank" in finding.sentence
    assert finding.confidence == 0.6


@pytest.mark.parametrize(
    "work",
    [
        slow_at(48, 4, {}),  # nobody is late
        slow_at(48, 4, {step: step % 4 for step in range(48)}, 1.1),  # by a tenth of a step
        slow_at(48, 4, {step: step // 4 % 4 for step in range(0, 48, 4)}),  # in every fourth step only
        slow_at(15, 4, {step: step % 4 for step in range(15)}),  # too few
    ],
)
def test_small_or_rare_lateness_is_no_rotation(work: list[list[float]]) -> None:
    assert found(stepping(work)) == []


def test_one_slow_rank_is_no_rotation() -> None:
    (finding,) = found(stepping(slow_at(48, 4, {step: 2 if step % 8 else 1 for step in range(48)})))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("slow_rank", [2])


def test_two_slow_ranks_of_four_are_no_rotation() -> None:
    findings = found(stepping(slow_at(48, 4, {step: step % 2 for step in range(48)})))
    assert "rotating_straggler" not in [finding.verdict.id for finding in findings]


def test_a_rank_that_was_slow_for_a_while() -> None:
    (finding,) = found(stepping(slow_at(60, 4, dict.fromkeys(range(10, 34), 1), 3.0)))
    assert (finding.verdict.id, finding.severity, finding.culprits) == ("passed_straggler", NOTE, ())
    assert finding.sentence == (
        "rank 1 (node a, pid 4001) slowed 3 ranks for 6.9 s, until 2.7 s ago, and no longer does"
    )
    assert (
        finding.evidence[0]
        == "it was the last in 24 operations of default_pg with a late rank, and in none of the 26 since"
    )


@pytest.mark.parametrize(
    "slow",
    [
        dict.fromkeys(range(10, 13), 1),  # three steps, as of a checkpoint
        dict.fromkeys(range(36, 60), 1),  # it goes on
        {**dict.fromkeys(range(10, 34), 1), 55: 1},  # it came back
    ],
)
def test_other_times_are_no_note(slow: dict[int, int]) -> None:
    assert "passed_straggler" not in [one.verdict.id for one in found(stepping(slow_at(60, 4, slow, 3.0)))]


@settings(deadline=None, max_examples=examples(30))
@given(size=st.integers(2, 8), jitter=st.floats(0.0, 0.03), seed=st.integers(0, 1 << 30))
def test_jitter_alone_makes_no_note(size: int, jitter: float, seed: int) -> None:
    rng = random.Random(seed)
    work = [[0.1 * (1 + rng.uniform(-jitter, jitter)) for _ in range(size)] for _ in range(48)]
    assert found(stepping(work)) == []


def test_clocks_that_may_differ_by_as_much_hide_a_rotation() -> None:
    job = stepping(slow_at(48, 2, {step: step % 2 for step in range(48)}, 1.4), nodes="ab")
    assert [one.verdict.id for one in found(job)] == ["rotating_straggler"]
    ranks = {one.node: [one] for one in job.ranks}
    apart = tuple(node(name, ranks[name], clock_error_ns=50_000_000) for name in "ab")
    # Without common ends the clocks cannot be compared.
    endless = [
        replace(one, done=tuple(replace(o, t_done_ns=None if o.t_done_ns is None else o.t_call_ns) for o in one.done))
        for one in job.ranks
    ]
    assert found(replace(job, nodes=apart, ranks=tuple(endless))) == []
