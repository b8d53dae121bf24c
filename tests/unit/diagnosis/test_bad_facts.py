"""Facts that are hard to believe: no wrong rank is named, and the answer says what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import ago, comm, elsewhere, facts, history, in_collective, node, op, rank, thread
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from simulated_jobs import STALLED_S, Blindness, Job, Outcome, blinded, jobs, simulated

from probing.diagnosis.facts import Condition, Facts, Missing, Operation, Rank, Witness
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.report import as_dict
from probing.diagnosis.verdict import ERROR, Finding

NAMES = ("all_reduce", "broadcast", "all_gather")


def errors(given: Facts) -> list[Finding]:
    diagnosis = diagnose(given)
    assert not [gap for gap in diagnosis.missing if gap.kind == "rule"]
    return [finding for finding in diagnosis.findings if finding.severity == ERROR]


def named(given: Facts) -> set[int]:
    return {culprit.rank for finding in errors(given) for culprit in finding.culprits}


def said(data: st.DataObject, one: Rank, outcome: Outcome) -> tuple[Witness, ...]:
    """Returns reports of any content about a rank, made at any time."""
    comms = [known.comm for known in outcome.facts.communicators]
    counts = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 40)), max_size=3).map(tuple)
    seconds = st.floats(0, 2 * STALLED_S)

    def record(place: str) -> Operation:
        seq, name = data.draw(st.integers(0, 40)), data.draw(st.sampled_from(NAMES))
        return Operation(
            place, seq, name, ago(data.draw(seconds)), None, data.draw(st.sampled_from(("started", "completed")))
        )

    found = []
    for _ in range(data.draw(st.integers(0, 3))):
        place, source = data.draw(st.sampled_from(comms)), data.draw(st.sampled_from(("ras", "flight_recorder")))
        operations = (record(place),) if source == "flight_recorder" else ()
        gone = {name: data.draw(st.booleans()) for name in ("missing", "dead")} if source == "ras" else {}
        found.append(Witness(source, place, ago(data.draw(seconds)), data.draw(counts), operations, **gone))
    return tuple(found)


@settings(max_examples=examples(200), deadline=None)
@given(jobs(stuck=2), st.data(), st.sampled_from([0.0, 5.0, -5.0]))
def test_witnesses_of_any_content_name_no_other_rank(job: Job, data: st.DataObject, ahead_s: float) -> None:
    outcome = simulated(job)
    heard = [replace(one, witnesses=said(data, one, outcome)) for one in outcome.facts.ranks]
    told = blinded(replace(outcome.facts, ranks=tuple(heard)), Blindness(ahead_s=ahead_s))
    assert named(told) == outcome.truth
    for finding in errors(told):
        contradicts = [line for line in finding.evidence if " contradicts: " in line]
        assert bool(contradicts) == any("which witness is right" in gap for gap in finding.missing)


@settings(max_examples=examples(100), deadline=None)
@given(jobs(), st.integers(0, 10**6))
def test_what_is_missing_is_said_of_a_culprit_whose_operations_were_lost(job: Job, seed: int) -> None:
    outcome = simulated(job)
    for finding in errors(blinded(outcome.facts, Blindness(seed, 0.2, 5.0))):
        lossy = {one.rank for one in blinded(outcome.facts, Blindness(seed, 0.2, 5.0)).ranks if one.lost}
        if lossy & {culprit.rank for culprit in finding.culprits}:
            assert finding.missing
            assert finding.confidence < 0.95


@pytest.mark.parametrize("open_", [True, False], ids=["waits", "does not wait"])
def test_a_stack_that_cannot_be_read(open_: bool) -> None:
    """The probes alone show who has joined; the answer says that no stack shows what the rank does."""
    waiting = [rank(n, *history(6, ago=40), op(7, ago=39), stack=in_collective()) for n in (0, 1)]
    calls = (*history(6, ago=40), op(7, ago=39)) if open_ else history(6, ago=40)
    (finding,) = errors(facts(*waiting, rank(2, *calls, condition=Condition(state="S"))))
    assert finding.verdict.id == ("no_completion" if open_ else "not_joined")
    assert [culprit.rank for culprit in finding.culprits] == ([] if open_ else [2])
    if not open_:
        assert "no stack of rank 2" in finding.missing
        assert finding.culprits[0].activity == "unknown"


def torch_rank(number: int, *ops: Operation) -> Rank:
    return rank(number, *history(6, ago=40, comm="torch"), *ops, stack=in_collective() if ops else elsewhere())


def jax_rank(number: int, *ops: Operation) -> Rank:
    jax = "/site-packages/jax/_src/"
    frames = (f"_value {jax}array.py:640", "train train.py:30")
    return rank(number, *history(9, ago=2, comm="jax"), *ops, stack=thread(*frames))


def mpi_rank(number: int) -> Rank:
    return rank(number, stack=thread("Allreduce mpi.py:11", "solve solve.py:7"))


FRAMEWORKS = [
    comm("torch", [0, 1]),
    comm("jax", [2, 3], backend="gloo"),
]


def test_of_ranks_of_three_frameworks_the_one_that_its_peer_waits_for_is_named() -> None:
    job = facts(
        torch_rank(0, op(7, ago=39, comm="torch")),
        torch_rank(1),
        jax_rank(2),
        jax_rank(3),
        mpi_rank(4),
        mpi_rank(5),
        comms=FRAMEWORKS,
    )
    (finding,) = errors(job)
    assert (finding.verdict.id, [culprit.rank for culprit in finding.culprits]) == ("not_joined", [1])
    assert finding.victims == (0,)


def test_a_communicator_whose_members_belong_to_another_framework_blames_nobody_of_them() -> None:
    """All that is known is that rank 0 waits in a communicator of four; the others report to no probe."""
    known = replace(comm("torch", [0]), size=4)
    job = facts(
        torch_rank(0, op(7, ago=90, comm="torch")),
        *(jax_rank(n) for n in (1, 2)),
        *(mpi_rank(n) for n in (3, 4, 5)),
        comms=[known, comm("jax", [1, 2])],
    )
    (finding,) = errors(job)
    assert (finding.verdict.id, finding.culprits) == ("cannot_tell", ())
    assert "it may be one of 3 unknown members" in finding.sentence


def test_ten_thousand_idle_jobs_have_a_note_each() -> None:
    listens: dict[str, Any] = {"syscall": "accept4", "target": "socket:[7] tcp 0.0.0.0:8000", "target_kind": "listener"}
    condition = Condition(state="S", asleep_since_ns=ago(600), **listens)
    stack = thread("accept /usr/lib/python3.11/socket.py:294", "next_request serve.py:23", **listens)
    idle = facts(
        rank(0, *history(6, ago=600), stack=stack, condition=condition),
        rank(1, *history(6, ago=600), op(7, "broadcast", ago=599), stack=in_collective("broadcast")),
        nodes=[node("a", advanced_ns=ago(599))],
    )
    for number in range(examples(10_000)):
        (finding,) = diagnose(replace(idle, job=f"job {number}", run=str(number))).findings
        assert (finding.verdict.id, finding.severity) == ("idle", "note")


def test_a_rank_that_nobody_asked_is_no_culprit_and_is_missing() -> None:
    waiting = [rank(n, *history(6, ago=90), op(7, ago=89), stack=in_collective()) for n in (0, 1)]
    gap = Missing("rank", "rank 2 was not seen", 2)
    job = facts(*waiting, comms=[comm("0", range(3))], world_size=3, missing=(gap,))
    (finding,) = errors(job)
    assert (finding.verdict.id, finding.culprits) == ("cannot_tell", ())
    assert "rank 2 was not seen" in str(as_dict(diagnose(job)))
