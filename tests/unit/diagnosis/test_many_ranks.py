"""Thousands of ranks: the work grows with their number, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from diagnosis_cases import (
    WORLD,
    ago,
    comm,
    facts,
    history,
    in_collective,
    instructions,
    op,
    rank,
)

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Endpoint, Exit, Facts, Rank, Witness
from probing.diagnosis.peer_sockets import first_to_close
from probing.diagnosis.rules import communicator_error, death


def pair(number: int) -> str:
    return f"tp{number // 2}"


def of_pairs(*ranks: Rank, **fields: Any) -> Facts:
    pairs = [comm(pair(first), (first, first + 1), backend="nccl") for first in range(0, len(ranks), 2)]
    return facts(*ranks, comms=[comm(WORLD, range(len(ranks)), backend="nccl"), *pairs], **fields)


def aborted(count: int) -> Callable[[], object]:
    """Each rank has aborted the communicator of its pair."""

    def made(number: int) -> Rank:
        failed = op(7, ago=39, took=29, comm=pair(number), state="failed", error="aborted")
        witness = Witness("probe", pair(number), ago(10), aborted=True, state="aborted")
        return rank(number, failed, witnesses=(witness,))

    given = of_pairs(*map(made, range(count)))
    return lambda: list(communicator_error.find(Case(given)))


def lost_peers(count: int) -> Callable[[], object]:
    """The error of each rank names a socket of the next rank."""

    def made(number: int) -> Rank:
        error = f"Connection closed by peer [10.0.0.9]:{46000 + (number + 1) % count}."
        failed = op(9, ago=20, took=0.1, state="failed", error=error)
        return rank(number, failed, exit=Exit(ago(20), 1), endpoints=(Endpoint("10.0.0.9", 46000 + number),))

    case = Case(facts(*map(made, range(count))))
    return lambda: first_to_close(case, ())


def left(count: int) -> Callable[[], object]:
    """Half of the ranks have exited with code 0, and the others wait, each in an operation of its own pair."""

    def made(number: int) -> Rank:
        if number < count // 2:
            return rank(number, *history(9, ago=60, comm=pair(number)), exit=Exit(ago(50), 0), state="exited")
        return rank(number, op(9, ago=40, comm=pair(number)), stack=in_collective())

    case = Case(of_pairs(*map(made, range(count))))
    _ = case.waits, case.sequences
    return lambda: list(death.find(case))


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (aborted, 200),
        (lost_peers, 200),
        (left, 200),
    ],
)
def test_twice_the_ranks_are_twice_the_work(made: Callable[[int], Callable[[], object]], count: int) -> None:
    assert instructions(made(2 * count)) < 2.6 * instructions(made(count))
