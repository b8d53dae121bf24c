"""NCCL's RAS and the flight recorder beside the probes: they agree, contradict, look too early, or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from diagnosis_cases import WORLD, ago, comm, elsewhere, facts, history, in_collective, op, rank

from probing.diagnosis.facts import Facts, Operation, Rank, Witness
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import Finding


def ras(count: int, *, at: float = 5, op_name: str = "all_reduce", **fields: object) -> Witness:
    return Witness("ras", WORLD, ago(at), launched=(("broadcast", 1), (op_name, count)), **fields)  # type: ignore[arg-type]


def dump(last: int, *, at: float = 5, name: str = "all_reduce", count: int = 10, state: str = "started") -> Witness:
    records = [
        Operation(WORLD, last - 1, "all_reduce", ago(40), None, "completed", "float", 10, source="flight_recorder"),
        Operation(WORLD, last, name, ago(39), None, state, "float", count, source="flight_recorder"),
    ]
    return Witness("flight_recorder", WORLD, ago(at), operations=tuple(records))


def not_joined(said: Sequence[Witness | None]) -> Facts:
    """Ranks 0 and 1 wait in operation 7 for rank 2."""
    heard = [(one,) if one else () for one in said] or [(), (), ()]
    waiting = [rank(n, *history(6, ago=40), op(7, ago=39), stack=in_collective(), witnesses=heard[n]) for n in (0, 1)]
    return facts(*waiting, rank(2, *history(6, ago=40), stack=elsewhere(moving=False), witnesses=heard[2]))


def only(given: Facts) -> Finding:
    (found,) = diagnose(given).findings
    return found


def confidence(given: Facts) -> float:
    return only(given).confidence


def test_a_witness_that_agrees_raises_the_confidence() -> None:
    alone = only(not_joined(()))
    assert (alone.verdict.id, [c.rank for c in alone.culprits]) == ("not_joined", [2])
    found = only(not_joined([ras(7), ras(7), ras(6)]))
    assert found.confidence > alone.confidence
    assert found.evidence[-1] == ("NCCL's RAS agrees: rank 2 launched 7 operations on default_pg, ranks 0-1 launched 8")
    found = only(not_joined([dump(7), dump(7), dump(6, state="completed")]))
    assert found.confidence > alone.confidence
    assert found.evidence[-1] == (
        "the flight recorder agrees: rank 2 called operation 6 of default_pg last, ranks 0-1 called 7"
    )


def test_a_witness_that_contradicts_lowers_it_and_the_answer_says_so() -> None:
    alone = confidence(not_joined(()))
    found = only(not_joined([ras(7), ras(7), ras(7)]))
    assert found.confidence == pytest.approx(alone / 2, abs=0.01)
    assert found.evidence[-1] == (
        "NCCL's RAS contradicts: rank 2 launched 8 operations on default_pg, as ranks 0-1 did"
    )
    assert found.missing[-1] == "which witness is right: NCCL's RAS contradicts what the probes saw"
    found = only(not_joined([dump(7), dump(7), dump(7)]))
    assert found.confidence == pytest.approx(alone / 2, abs=0.01)


@pytest.mark.parametrize(
    "said",
    [
        [ras(7, at=60), ras(7, at=60), ras(7, at=60)],
        [ras(7, at=38.5), ras(7, at=38.5), ras(7, at=38.5)],
        [None, None, ras(6)],
        [ras(7), ras(7), None],
        [dump(6, state="completed"), dump(6, state="completed"), dump(6, state="completed")],
        [dump(7, at=60), dump(7, at=60), dump(6, at=60)],
        [Witness("ras", "other", ago(5), launched=(("all_reduce", 9),))] * 3,
    ],
)
def test_a_witness_that_looked_too_early_or_elsewhere_says_nothing(said: list[Witness | None]) -> None:
    assert only(not_joined(said)) == only(not_joined(())) or _same_but_witnesses(said)


def _same_but_witnesses(said: list[Witness | None]) -> bool:
    with_them, alone = only(not_joined(said)), only(not_joined(()))
    return (with_them.confidence, with_them.evidence) == (alone.confidence, alone.evidence)


def test_a_rank_that_ras_cannot_reach_has_not_joined() -> None:
    found = only(not_joined([ras(7), ras(7), Witness("ras", WORLD, ago(5), missing=True)]))
    assert found.evidence[-1] == "NCCL's RAS agrees: it cannot reach rank 2"


def mismatch(said: Sequence[Witness]) -> Facts:
    calls = ["all_reduce", "all_reduce", "broadcast"]
    ranks = [
        rank(n, *history(6, ago=40), op(7, name, ago=39), stack=in_collective(name), witnesses=(one,))
        for n, (name, one) in enumerate(zip(calls, said, strict=True))
    ]
    return facts(*ranks)


def test_witnesses_of_different_calls() -> None:
    alone = only(mismatch([Witness("probe", WORLD)] * 3))
    assert alone.verdict.id == "operation_mismatch"
    other = Witness("ras", WORLD, ago(5), launched=(("broadcast", 2), ("all_reduce", 6)))
    found = only(mismatch([ras(7), ras(7), other]))
    assert found.confidence > alone.confidence
    assert found.evidence[-1] == (
        "NCCL's RAS agrees: rank 2 launched 2 broadcast, 6 all_reduce; rank 0 launched 1 broadcast, 7 all_reduce"
    )
    assert only(mismatch([ras(7), ras(7), ras(7)])).confidence < alone.confidence
    agreeing = only(mismatch([dump(7), dump(7), dump(7, name="broadcast")]))
    assert agreeing.evidence[-1] == (
        "the flight recorder agrees: rank 2 is at broadcast of 10 float number 7; rank 0 is at all_reduce of 10 float"
        " number 7"
    )
    assert only(mismatch([dump(7)] * 3)).confidence < alone.confidence


def stuck(said: Sequence[Witness | None]) -> Facts:
    def waiting(n: int) -> Rank:
        heard = (one,) if said and (one := said[n]) else ()
        return rank(n, *history(6, ago=40), op(7, ago=39), stack=in_collective(), witnesses=heard)

    return facts(*(waiting(n) for n in range(3)), comms=[comm(WORLD, range(3), backend="nccl")])


def test_witnesses_of_an_operation_that_does_not_complete() -> None:
    alone = only(stuck([]))
    assert alone.verdict.id == "no_completion"
    found = only(stuck([ras(7), ras(7), ras(7)]))
    assert found.confidence > alone.confidence
    assert found.evidence[-1] == "NCCL's RAS agrees: ranks 0-2 launched 8 operations on default_pg"
    found = only(stuck([ras(7), ras(7), ras(6)]))
    assert found.confidence < alone.confidence
    assert found.evidence[-1] == (
        "NCCL's RAS contradicts: rank 2 launched 7 operations on default_pg, the others launched 8"
    )
