"""The change point of step times, and the finding that all ranks are slower."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from diagnosis_cases import NOW, facts, frame, rank
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Frame, Sample
from probing.diagnosis.rules.job_slowdown import change_point, find
from probing.diagnosis.sample_difference import growth
from probing.diagnosis.verdict import WARNING, Finding, Verdict

FORWARD, SLOW, WAIT = (
    frame("forward model.py:9"),
    frame("read store.py:7"),
    frame("all_reduce /t/distributed/distributed_c10d.py:3"),
)


def steps(*parts: tuple[int, float], jitter: float = 0.05, seed: int = 7) -> list[float]:
    rng = random.Random(seed)
    return [seconds * (1 + rng.uniform(-jitter, jitter)) for count, seconds in parts for _ in range(count)]


def test_where_steps_became_longer() -> None:
    found = change_point(steps((50, 1.0), (15, 1.5)))
    assert found is not None
    assert (found.index, round(found.before, 1), round(found.after, 1)) == (50, 1.0, 1.5)


@pytest.mark.parametrize(
    "parts",
    [
        [(65, 1.0)],
        [(50, 1.0), (15, 1.2)],
        [(50, 1.0), (9, 2.0)],
        [(14, 1.0), (15, 2.0)],
        [(50, 2.0), (15, 1.0)],
        [(50, 1.0), (15, 2.0), (5, 1.0)],
        [(30, 1.0), (8, 2.0), (30, 1.0), (12, 2.0)],
        [(5, 9.0), (60, 1.0)],
        [],
    ],
)
def test_no_change(parts: list[tuple[int, float]]) -> None:
    assert change_point(steps(*parts)) is None


def test_a_change_long_ago() -> None:
    found = change_point(steps((30, 1.0), (300, 3.0)))
    assert found is not None
    assert found.index == 30


def test_a_slow_start_hides_nothing() -> None:
    found = change_point(steps((3, 30.0), (60, 1.0), (15, 1.6)))
    assert found is not None
    assert found.index == 63


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 1 << 30), count=st.integers(0, 200), jitter=st.floats(0, 0.9))
def test_noise_is_no_change(seed: int, count: int, jitter: float) -> None:
    assert change_point(steps((count, 1.0), jitter=jitter, seed=seed)) is None


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 1 << 30), before=st.integers(20, 100), after=st.integers(10, 50), ratio=st.floats(1.5, 10))
def test_a_real_change_is_found_where_it_is(seed: int, before: int, after: int, ratio: float) -> None:
    found = change_point(steps((before, 1.0), (after, ratio), jitter=0.1, seed=seed))
    assert found is not None
    assert found.index == before


def job(
    durations: Sequence[float], samples: Sequence[Sample] = (), past: Sequence[Sample] = (), **fields: Any
) -> Facts:
    end, history = NOW, []
    for seconds in reversed(durations):
        history.append((end, round(seconds * 1e9)))
        end -= round(seconds * 1e9)
    ranks = [rank(n, samples=tuple(samples), past_samples=tuple(past)) for n in range(2)]
    return facts(*ranks, step_history=tuple(reversed(history)), **fields)


def found_in(made: Facts) -> list[Finding]:
    return list(find(Case(made)))


def test_all_ranks_are_slower_and_what_they_do_more() -> None:
    past = (Sample((FORWARD,), 0.8, True), Sample((WAIT,), 0.2, False))
    now = (Sample((FORWARD,), 0.4, True), Sample((WAIT,), 0.1, False), Sample((SLOW,), 0.5, False))
    (finding,) = found_in(job(steps((50, 1.0), (20, 2.0)), now, past))
    assert finding.sentence == (
        "ranks 0-1 are slower than before: a step takes 2 s instead of 991 ms; 50% of the time is spent in read,"
        " store.py:7, before 0%"
    )
    assert (finding.severity, finding.culprits, finding.victims, finding.confidence) == (WARNING, (), (0, 1), 0.8)
    assert finding.evidence[1] == "stacks of all ranks: read, store.py:7 50% of the time, mostly off the CPU, before 0%"


def test_a_slower_network() -> None:
    past = (Sample((FORWARD,), 0.8, True), Sample((WAIT,), 0.2, False))
    now = (Sample((FORWARD,), 0.4, True), Sample((WAIT,), 0.6, False))
    (finding,) = found_in(job(steps((50, 1.0), (20, 2.0)), now, past))
    assert "the ranks wait for each other or for the network 60% of the time, before 20%" in finding.evidence


def test_without_stacks_the_confidence_is_lower() -> None:
    (finding,) = found_in(job(steps((50, 1.0), (20, 2.0))))
    assert (finding.confidence, finding.missing) == (0.6, ("samples of the stacks now and before",))


def test_an_evaluation_is_no_slowdown() -> None:
    now = (Sample((frame("evaluate train.py:90"),), 1.0, True),)
    assert found_in(job(steps((50, 1.0), (20, 2.0)), now, (Sample((FORWARD,), 1.0, True),))) == []


def test_it_has_to_last() -> None:
    assert found_in(job(steps((50, 0.1), (20, 0.2)))) == []


def test_steps_of_long_ago_are_no_news() -> None:
    assert found_in(job(steps((50, 1.0), (20, 2.0)), taken_ns=NOW + 10**12, nodes=())) == []


def test_a_rank_that_is_slow_explains_it() -> None:
    case = Case(job(steps((50, 1.0), (20, 2.0))))
    case.found.append(Finding(Verdict("slow_rank", "slow", "", "", "", "", "", ()), WARNING, 0.9, ""))
    assert list(find(case)) == []


def test_the_same_code_that_takes_longer_is_named_by_its_time_in_a_step() -> None:
    read, rest = Frame("read_batch", "slow.py", 77), Frame("step", "slow.py", 40)

    def samples(share: float) -> list[Sample]:
        return [Sample((read, rest), share, on_cpu=False), Sample((rest,), 1 - share, on_cpu=True)]

    found = growth(samples(0.9), 50e6, samples(0.97), 170e6)
    assert found is not None
    assert (found.frame, round(found.before / 1e6), round(found.after / 1e6)) == (read, 45, 165)
    assert growth([], 50e6, samples(0.97), 170e6) is None
