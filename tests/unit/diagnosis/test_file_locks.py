"""Ranks that wait for the lock of a file that another rank holds."""

from __future__ import annotations

from dataclasses import replace

from diagnosis_cases import ago, elsewhere, facts, history, in_collective, op, rank

from probing.diagnosis.facts import Condition, Facts, Rank
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import Finding

WANTS = Condition(state="S", syscall="flock", target="/data/tuned.lock, held by python (pid 4000, state S)")


def wants(number: int, holder: int, node: str = "a") -> Rank:
    """Rank ``number`` waits for a lock that process ``holder`` has."""
    condition = replace(WANTS, lock_holder=holder, asleep_since_ns=ago(38))
    place = elsewhere("read_tuned tune.py:7", moving=False, syscall="flock")
    return rank(number, *history(6, ago=40), stack=place, condition=condition, node=node)


def waits(number: int) -> Rank:
    return rank(number, *history(6, ago=40), op(7, ago=39), stack=in_collective())


def the(given: Facts) -> Finding:
    (finding,) = diagnose(given).findings
    return finding


def test_the_rank_that_keeps_a_file_lock_and_waits_for_those_that_want_it_is_named() -> None:
    found = the(facts(waits(0), wants(1, 4000), wants(2, 4000), waits(3)))
    assert (found.verdict.id, [culprit.rank for culprit in found.culprits]) == ("deadlock", [0])
    assert found.victims == (1, 2, 3)
    assert "rank 1 waits for the lock of a file that rank 0 holds" in found.sentence
    assert "/data/tuned.lock" in " ".join(found.evidence)


def test_the_rank_that_keeps_a_file_lock_elsewhere_is_named() -> None:
    holder = rank(2, *history(6, ago=40), stack=elsewhere("convert model.py:3", moving=False))
    found = the(facts(waits(0), wants(1, 4002), holder))
    assert (found.verdict.id, [culprit.rank for culprit in found.culprits]) == ("not_joined", [2])
    assert found.victims == (0, 1)
    assert "rank 1 waits for the lock of a file that rank 2 holds" in found.evidence


def test_a_lock_of_a_process_that_is_no_rank_of_the_node_blames_no_rank() -> None:
    for holder, node in ((17, "a"), (4000, "b")):
        found = the(facts(waits(0), wants(1, holder, node), waits(2)))
        assert (found.verdict.id, [culprit.rank for culprit in found.culprits]) == ("not_joined", [1])
        assert "held by python" in found.sentence


def test_ranks_that_want_a_lock_and_hold_nobody_up_are_no_finding() -> None:
    """As in a job whose ranks read a cache in turn: nobody waits in a collective yet."""
    young = replace(WANTS, lock_holder=4000, asleep_since_ns=ago(2))
    ranks = [rank(n, *history(6, ago=3), stack=elsewhere(), condition=young if n else None) for n in range(3)]
    assert diagnose(facts(*ranks)).findings == ()
