"""Errors and aborts of communicators: who had them first, and what the ranks had called."""

from __future__ import annotations

from dataclasses import replace

from diagnosis_cases import WORLD, ago, comm, facts, history, node, op, rank

from probing.diagnosis.facts import Exit, Facts, Rank, Witness
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.rules import communicator_error
from probing.diagnosis.verdict import ERROR, NOTE, Finding


def error(seconds: float, name: str | None = "ncclSystemError", **fields: object) -> tuple[Witness, ...]:
    return (Witness("probe", WORLD, ago(seconds), async_error=name, **fields),)  # type: ignore[arg-type]


def waiting(number: int, *witnesses: Witness, **fields: object) -> Rank:
    return rank(number, *history(6, ago=40), op(7, ago=39), witnesses=witnesses, **fields)


def nccl(*ranks: Rank) -> Facts:
    return facts(*ranks, comms=[comm(WORLD, [r.rank for r in ranks], backend="nccl")])


def only(given: Facts) -> Finding:
    (found,) = diagnose(given, (communicator_error,)).findings
    return found


def blamed(found: Finding) -> list[int]:
    return [culprit.rank for culprit in found.culprits]


def test_the_first_error_of_its_own_is_to_blame() -> None:
    remote = error(20, "ncclRemoteError")
    found = only(nccl(waiting(0, *remote), waiting(1, *error(23)), waiting(2, *remote)))
    assert (blamed(found), found.severity, found.confidence) == ([1], ERROR, 0.85)
    assert found.sentence == (
        "rank 1 (node a, pid 4001) has an error on default_pg: ncclSystemError; ranks 0-2 wait in it"
    )
    assert found.since_ns == ago(23)
    assert "rank 0 got ncclRemoteError on default_pg, 3 s after rank 1" in found.evidence


def test_the_evidence_of_many_ranks_is_short() -> None:
    late = [rank(r, *history(5, ago=42)) for r in range(500, 1000)]
    found = only(nccl(*(waiting(r, *error(20, state="aborted")) for r in range(500)), *late))
    assert len(found.evidence) <= 16


def test_errors_at_one_time_name_nobody() -> None:
    found = only(nccl(waiting(0, *error(20)), waiting(1, *error(20.1)), waiting(2)))
    assert (blamed(found), found.missing) == ([], ("which rank had the error first",))
    # Well apart, on one node, the first is to blame.
    assert blamed(only(nccl(waiting(0, *error(20)), waiting(1, *error(21)), waiting(2)))) == [1]


def test_clocks_that_are_not_known_well_put_no_rank_first() -> None:
    # No collective that both have ended makes the clocks known better.
    ranks = (rank(0, op(7, ago=39), witnesses=error(20)), rank(1, op(7, ago=39), witnesses=error(25), node="b"))
    sure = facts(*ranks, comms=[comm(WORLD, (0, 1))], nodes=[node("a"), node("b", clock_error_ns=10**6)])
    unsure = facts(*ranks, comms=[comm(WORLD, (0, 1))], nodes=[node("a"), node("b", clock_error_ns=6 * 10**9)])
    assert blamed(only(sure)) == [1]
    assert blamed(only(unsure)) == []


def test_errors_that_tell_of_another_rank_name_only_one_that_is_gone() -> None:
    remote = error(20, "ncclRemoteError")
    assert blamed(only(nccl(waiting(0, *remote), waiting(1, *remote), waiting(2)))) == []
    gone = waiting(2, exit=Exit(ago(21), signal=9))
    assert blamed(only(nccl(waiting(0, *remote), waiting(1, *remote), gone))) == [2]


def test_after_an_abort_the_rank_that_did_not_join_is_to_blame() -> None:
    aborted = Witness("probe", WORLD, ago(10), aborted=True, state="aborted")
    failed = op(7, ago=39, took=29, state="failed", error="aborted")
    gave_up = [rank(n, *history(6, ago=40), failed, witnesses=(aborted,)) for n in (0, 1)]
    found = only(nccl(*gave_up, rank(2, *history(6, ago=40))))
    assert (blamed(found), found.confidence) == ([2], 0.75)
    assert found.sentence == (
        "rank 2 (node a, pid 4002) did not join operation 7 of default_pg, which ranks 0-1 gave up"
    )
    # Its operations were lost, or it was followed too late: nobody can be named.
    assert blamed(only(nccl(*gave_up, rank(2, *history(6, ago=40), lost=3)))) == []
    assert blamed(only(nccl(*gave_up, rank(2, seen_from_ns=ago(5))))) == []


def test_an_abort_with_nothing_open_is_the_end_of_a_job() -> None:
    aborted = Witness("probe", WORLD, ago(10), aborted=True, state="aborted")
    ended = [rank(n, *history(6, ago=11), witnesses=(aborted,)) for n in (0, 1)]
    assert diagnose(nccl(*ended), (communicator_error,)).findings == ()


def test_a_job_that_goes_on_with_another_communicator_has_recovered() -> None:
    again = [
        rank(n, *history(6, ago=40), *history(9, ago=1, comm="1"), witnesses=error(30) if n else ()) for n in (0, 1)
    ]
    found = only(facts(*again, comms=[comm(WORLD, (0, 1)), comm("1", (0, 1))]))
    assert (found.severity, blamed(found)) == (NOTE, [1])


def test_a_finding_that_explains_the_ranks_goes_before() -> None:
    given = nccl(waiting(0, *error(20, "ncclRemoteError")), waiting(1, *error(23)))
    case = diagnose(replace(given, communicators=()), (communicator_error,)).findings
    assert [f.about for f in case] == [WORLD]
    ranks = (waiting(0, *error(20, "ncclRemoteError")), rank(1, *history(6, ago=40), exit=Exit(ago(21), signal=9)))
    assert "communicator_error" not in [f.verdict.id for f in diagnose(nccl(*ranks)).findings]
