"""Random jobs, faults and losses: the true culprit is found, and never another one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from simulated_jobs import Blindness, Call, Job, Outcome, blinded, jobs, simulated

from probing.diagnosis.facts import Facts
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, Finding

# Names of operations that the faults put in, which the random jobs do not use.
ODD = "reduce_scatter"


def errors(facts: Facts) -> list[Finding]:
    diagnosis = diagnose(facts)
    assert not [m for m in diagnosis.missing if m.kind == "rule"]
    return [finding for finding in diagnosis.findings if finding.severity == ERROR]


def named(facts: Facts) -> set[int]:
    return {culprit.rank for finding in errors(facts) for culprit in finding.culprits}


@settings(max_examples=examples(200), deadline=None)
@given(jobs())
def test_the_true_culprit_is_found_exactly(job: Job) -> None:
    outcome = simulated(job)
    found = errors(outcome.facts)
    assert {c.rank for f in found for c in f.culprits} == outcome.truth
    if outcome.truth:
        (finding,) = found
        assert finding.verdict.id == "not_joined"
        assert set(finding.victims) == outcome.waiting
        assert finding.confidence >= 0.9


@settings(max_examples=examples(200), deadline=None)
@given(jobs(stuck=3))
def test_several_culprits_are_found_exactly_and_none_of_them_waits(job: Job) -> None:
    outcome = simulated(job)
    assert named(outcome.facts) == outcome.truth
    assert not named(outcome.facts) & outcome.waiting


@settings(max_examples=examples(300), deadline=None)
@given(
    jobs(stuck=2),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.05, 5.0, -5.0]),
    st.booleans(),
    st.sets(st.integers(0, 8)),
    st.booleans(),
    st.booleans(),
)
def test_with_losses_clocks_and_missing_witnesses_no_other_rank_is_named(
    job: Job, seed: int, dropped: float, ahead_s: float, hide: bool, stackless: set[int], late: bool, timeless: bool
) -> None:
    outcome = simulated(job)
    unseen = random.Random(seed).randrange(len(job.programs)) if hide else None
    left = blinded(outcome.facts, Blindness(seed, dropped, ahead_s, unseen, frozenset(stackless), late, timeless))
    found = errors(left)
    assert {c.rank for f in found for c in f.culprits} <= outcome.truth
    assert {f.verdict.id for f in found} <= {"not_joined", "cannot_tell"}


@settings(max_examples=examples(200), deadline=None)
@given(jobs(stuck=0), st.data(), st.integers(0, 10**6), st.booleans())
def test_with_losses_no_other_rank_is_the_odd_one(job: Job, data: st.DataObject, seed: int, hide: bool) -> None:
    members = job.comms[0]
    odd = set(data.draw(st.lists(st.sampled_from(members), min_size=1, max_size=(len(members) + 1) // 2 - 1 or 1)))
    programs = [[*p, Call(0, ODD if rank in odd else "all_reduce")] for rank, p in enumerate(job.programs)]
    outcome = simulated(replace(job, programs=programs))
    unseen = random.Random(seed).randrange(len(programs)) if hide else None
    assert named(blinded(outcome.facts, Blindness(seed, 0.2, 5.0, unseen))) <= odd


@settings(max_examples=examples(100), deadline=None)
@given(jobs(), st.sampled_from([0.05, 5.0, -5.0]))
def test_clocks_that_differ_change_no_verdict(job: Job, ahead_s: float) -> None:
    outcome = simulated(job)
    left = blinded(outcome.facts, Blindness(ahead_s=ahead_s))
    assert [f.verdict.id for f in errors(left)] == [f.verdict.id for f in errors(outcome.facts)]
    assert named(left) == outcome.truth


@settings(max_examples=examples(100), deadline=None)
@given(jobs(), st.integers(0, 10**6))
def test_with_all_stacks_losses_hide_no_culprit_that_stands_elsewhere(job: Job, seed: int) -> None:
    outcome = simulated(job)
    left = blinded(outcome.facts, Blindness(seed, 0.2))
    found = errors(left)
    assert {c.rank for f in found for c in f.culprits} <= outcome.truth
    if outcome.truth:
        assert found


@settings(max_examples=examples(100), deadline=None)
@given(jobs(stuck=0), st.data())
def test_a_rank_that_calls_something_else_is_the_odd_one(job: Job, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(job.programs) - 1))
    calls = list(job.programs[rank])
    at = data.draw(st.integers(0, len(calls) - 1))
    calls[at] = Call(calls[at].comm, ODD)
    outcome = simulated(_with_program(job, rank, calls))
    found = errors(outcome.facts)
    size = len(job.comms[calls[at].comm])
    assert [f.verdict.id for f in found] == ["operation_mismatch"]
    culprits = {c.rank for c in found[0].culprits}
    # Of two that differ the job's repeated sequence may show which one left it.
    assert culprits in (({rank},) if size > 2 else ({rank}, set()))
    assert set(found[0].victims) | culprits == outcome.waiting


@settings(max_examples=examples(200), deadline=None)
@given(jobs(stuck=0), st.data())
def test_calls_in_another_order_are_a_deadlock_of_ranks_that_wait_for_each_other(job: Job, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(job.programs) - 1))
    calls = list(job.programs[rank])
    at = data.draw(st.integers(0, len(calls) - 2))
    calls[at], calls[at + 1] = calls[at + 1], calls[at]
    outcome = simulated(_with_program(job, rank, calls))
    found = errors(outcome.facts)
    assert bool(found) == bool(outcome.waiting)
    for finding in found:
        assert finding.verdict.id in ("deadlock", "operation_mismatch", "shifted_sequence")
        assert {c.rank for c in finding.culprits} | set(finding.victims) == outcome.waiting


@settings(max_examples=examples(50), deadline=None)
@given(jobs(stuck=0))
def test_a_job_that_runs_to_its_end_has_no_finding(job: Job) -> None:
    outcome = simulated(job)
    assert not outcome.waiting
    young = replace(outcome.facts, stall_s=60.0)
    assert errors(young) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_finding_keeps_its_name_while_the_situation_lasts(seed: int) -> None:
    job = Job(
        [(0, 1, 2, 3), (0, 1), (2, 3)],
        [[Call(0, "barrier"), Call(1 + rank // 2, "all_reduce"), Call(0, "all_reduce")] * 3 for rank in range(4)],
        {seed % 4: 4},
    )
    facts = simulated(job).facts
    later = replace(
        facts,
        taken_ns=facts.taken_ns + 60 * 10**9,
        nodes=tuple(replace(node, taken_ns=node.taken_ns + 60 * 10**9) for node in facts.nodes),
    )
    first, second = errors(facts), errors(later)
    assert [(f.verdict.id, f.about, f.culprits) for f in first] == [(f.verdict.id, f.about, f.culprits) for f in second]


def _with_program(job: Job, rank: int, calls: list[Call]) -> Job:
    return replace(job, programs=[calls if r == rank else p for r, p in enumerate(job.programs)])


def test_the_simulator_knows_who_waits() -> None:
    job = Job([(0, 1)], [[Call(0, "barrier")] * 3, [Call(0, "barrier")] * 3], {1: 2})
    outcome: Outcome = simulated(job)
    assert (outcome.truth, outcome.waiting) == ({1}, {0})
    assert [len(rank.done) for rank in outcome.facts.ranks] == [2, 2]
