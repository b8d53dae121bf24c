"""Operations that ranks wait in, and for which it is not known whether all members have joined."""

from __future__ import annotations

from dataclasses import dataclass

from probing.api.text import time_text
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import longest_wait, operation_text
from probing.diagnosis.waits import INIT
from probing.diagnosis.words import ranks_wait

__all__ = ("Unseen", "unseen")


@dataclass(frozen=True, slots=True)
class Unseen:
    """An operation in which ``waiters`` wait. ``unknown``: the ranks that may not have joined it. ``unidentified``: the
    number of members whose ranks are not known. ``age_ns`` and ``since_ns``: None if not known."""

    comm: str | None
    number: int | None
    waiters: tuple[int, ...]
    victims: tuple[int, ...]
    unknown: tuple[int, ...]
    unidentified: int
    age_ns: int | None
    since_ns: int | None
    text: str


def unseen(case: Case) -> list[Unseen]:
    """Returns these operations, the oldest first, without those whose waiters a finding explains."""
    graph = case.graph
    explained = case.explained
    places: dict[tuple[str | None, int | None], list[int]] = {}
    for rank, wait in sorted(graph.waits.items()):
        pending = graph.pending[rank]
        if pending.doubtful and not pending.awaited and wait.op != INIT and rank not in explained:
            sequence = case.sequences.get(wait.comm) if wait.comm is not None else None
            places.setdefault((wait.comm, sequence.number(rank, wait.seq) if sequence else None), []).append(rank)
    found = [_unseen(case, comm, number, waiters) for (comm, number), waiters in places.items()]
    return sorted(found, key=lambda place: -(place.age_ns or 0))


def _unseen(case: Case, comm: str | None, number: int | None, waiters: list[int]) -> Unseen:
    graph = case.graph
    wait, pending = longest_wait(case, waiters), graph.pending_of(waiters)
    call = operation_text(case, comm, graph.waits[waiters[0]].op, number)
    return Unseen(
        comm,
        number,
        tuple(waiters),
        tuple(sorted({*waiters, *graph.victims(waiters)})),
        tuple(sorted({rank for one in pending for rank in one.unknown})),
        max(one.unidentified for one in pending),
        wait.age_ns,
        wait.since_ns,
        f"{ranks_wait(waiters)} in {call} for {time_text(wait.age_ns)}",
    )
