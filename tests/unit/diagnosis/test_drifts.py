"""A rank that made one collective less or more on a communicator than the others, and since when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import WORLD, ago, comm, facts, in_collective, op, rank

from probing.diagnosis.case import Case
from probing.diagnosis.drifts import Drift, drifts_of
from probing.diagnosis.facts import Facts, Operation, Rank, Step
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import Finding

# Of each step: an asynchronous call of dp, then one of the world.
STEP_S = 1.0


def steps(last: int, skips: dict[int, int], pending: str, *, extra: tuple[str, ...] = ()) -> list[Operation]:
    """Calls of steps 1 to ``last``, of which the newest began 40 s ago. ``skips``: by step, how many calls of dp it
    makes more (negative: less) than one. ``pending``: where the rank then waits. ``extra``: more communicators."""
    made, seqs = [], dict.fromkeys(("dp", WORLD, *extra), 0)

    def call(name: str, at: float, took: float | None = 0.01) -> None:
        seqs[name] += 1
        made.append(op(seqs[name], ago=at, took=took, comm=name))

    for step in range(1, last + 1):
        begun = 40 + (last - step) * STEP_S
        for number in range(1 + skips.get(step, 0)):
            call("dp", begun - 0.01 * number)
        for number, name in enumerate((WORLD, *extra)):
            call(name, begun - 0.1 - 0.1 * number)
    call(pending, 39, None)
    return made


def job(*ranks: list[Operation], stepping: bool = False) -> Facts:
    """Ranks with these calls; ``stepping``: their steps are known, and count from 800."""
    names = dict.fromkeys(one.comm for own in ranks for one in own)
    known = tuple(Step(800 + n, ago(52 - n), 10**9) for n in range(13))
    made: list[Rank] = [
        replace(rank(number, *own, stack=in_collective()), steps=known if stepping else ())
        for number, own in enumerate(ranks)
    ]
    return facts(*made, comms=[comm(name, range(len(ranks))) for name in names])


def finding_of(given: Facts) -> Finding:
    return diagnose(given).findings[0]


def drifts(given: Facts, name: str = "dp") -> list[Drift]:
    return list(drifts_of(Case(given).sequences, name))


WELL = steps(12, {}, "dp")


def test_a_rank_that_skipped_a_collective_some_steps_before_the_hang() -> None:
    given = job(WELL, steps(12, {10: -1}, WORLD), WELL, stepping=True)
    assert drifts(given) == [Drift("dp", (1,), -1, WORLD, 10)]
    finding = finding_of(given)
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("deadlock", [1])
    assert finding.sentence.endswith(
        "; since step 810 rank 1 has made 1 all_reduce less on dp, or 1 more on default_pg, than the other ranks"
    )
    assert finding.evidence[0].startswith("since step 810 rank 1 has made 1 all_reduce less on dp")


def test_of_two_ranks_the_one_that_left_the_period_is_named() -> None:
    given = job(WELL, steps(12, {11: -1}, WORLD))
    assert drifts(given) == [Drift("dp", (1,), -1, WORLD, 11)]
    finding = finding_of(given)
    # Without it both wait for each other, and nobody is named alone.
    assert ([c.rank for c in finding.culprits], finding.victims) == ([1], (0,))
    assert "since call seq 11 of default_pg rank 1 has made 1 all_reduce less on dp" in finding.sentence


def test_a_rank_that_made_one_more() -> None:
    given = job(WELL, WELL, WELL, steps(12, {10: 1}, WORLD))
    assert drifts(given) == [Drift("dp", (3,), 1, WORLD, 10)]


def test_a_drift_that_grows_with_each_step() -> None:
    given = job(WELL, steps(12, {10: -1, 11: -1, 12: -1}, WORLD), WELL)
    assert drifts(given) == [Drift("dp", (1,), -3, WORLD, 10)]
    assert "has made 3 all_reduces less on dp" in finding_of(given).sentence


def test_a_third_communicator_tells_which_one_differs() -> None:
    other = steps(12, {}, "dp", extra=("tp",))
    given = job(other, steps(12, {10: -1}, WORLD, extra=("tp",)), other)
    assert sorted(one.marks for one in drifts(given)) == [WORLD, "tp"]
    sentence = finding_of(given).sentence
    assert "rank 1 has made 1 all_reduce less on dp than the other ranks" in sentence


def test_a_hang_in_the_very_step() -> None:
    # Rank 1 is in the world's call of step 13, the others in that of dp.
    skipped = [*steps(12, {}, WORLD)]
    assert drifts(job(WELL, skipped, WELL)) == [Drift("dp", (1,), -1, WORLD, 13)]
    # Rank 1 has called dp twice, the others wait in the world.
    twice = [*steps(12, {}, "dp")[:-1], op(13, ago=39, took=0.01, comm="dp"), op(14, ago=38.9, comm="dp")]
    usual = [*steps(12, {}, "dp")[:-1], op(13, ago=39, took=0.01, comm="dp"), op(13, ago=38.9)]
    assert drifts(job(usual, twice, usual)) == [Drift("dp", (1,), 1, WORLD, 13)]


def test_a_rank_that_has_not_called_yet_has_not_drifted() -> None:
    late = steps(12, {}, "dp")[:-1]
    assert drifts(job(WELL, late, WELL)) == []


@pytest.mark.parametrize(
    "odd",
    [
        steps(12, {2: -1}, WORLD),  # it was so nearly from the start: the program may call in this order
        steps(12, {9: -1, 10: 1}, WORLD),  # it is even again
        steps(12, {9: -1, 11: 2}, WORLD),  # behind, then ahead
        steps(12, {10: -1}, WORLD)[5:],  # calls are missing
        [one for one in steps(12, {10: -1}, WORLD) if one.seq != 8],
    ],
)
def test_other_orders_are_no_drift(odd: list[Operation]) -> None:
    assert drifts(job(WELL, odd, WELL)) == []


def test_two_ranks_without_a_period_are_undecided() -> None:
    uneven = {1: 1, 4: 2, 6: 1, 9: 3}
    given = job(steps(12, uneven, "dp"), steps(12, {**uneven, 11: -1}, WORLD))
    assert drifts(given) == []
