"""Ranks wait for each other in a cycle, through several communicators or through sends and receives."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import listed, ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.disagreements import vote
from probing.diagnosis.holdups import cycles, doubts, edge_text, longest_wait, lowered, operation_text, site
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.waits import FILE_LOCK, is_p2p
from probing.diagnosis.words import ranks_wait

__all__ = ("VERDICTS", "find")

_MOST_EDGES = 8

DEADLOCK = Verdict(
    "deadlock",
    "hang",
    "Ranks wait for each other in a cycle",
    "The wait-for graph (a rank, the operation that it waits in, the ranks that have not joined it) has a cycle. A rank"
    " that waits for the lock of a file leads to the rank that holds it. If most ranks of the cycle wait in one"
    " operation or for one lock, the others are named; else all of them. A cycle with a wait in a store or for a new"
    " communicator does not count if one of its ranks also waits for a rank that waits for nobody.",
    "The cycle: which rank waits for which rank, in which operation or for which lock.",
    "0.95; less where operations were lost or only stacks show the operations.",
    "An operation of the cycle that all of its ranks have called.",
    (
        "Let all ranks call the collectives of different groups in one order.",
        "Compare the stacks of two ranks of the cycle: the order of their calls differs there.",
    ),
    ("branch",),
)
VERDICTS = (DEADLOCK,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each cycle that has only collectives, or only sends and receives."""
    for component in cycles(case):
        alone = [rank for rank in component if is_p2p(case.graph.waits[rank].op)]
        if not alone or len(alone) == len(component):
            yield _finding(case, component)


def _finding(case: Case, component: tuple[int, ...]) -> Finding:
    cycle = case.graph.cycle(component)
    wait = longest_wait(case, [edge.waiter for edge in cycle])
    calls = {rank: (case.graph.waits[rank].comm, case.graph.waits[rank].op) for rank in component}
    votes = vote(calls)
    most = votes.groups[0][1]
    odd = votes.odd if len(votes.groups) > 1 and 2 * len(most) > len(component) else component
    missing = doubts(case, (), component)
    victims = tuple(sorted((set(component) | set(case.graph.victims(component))) - set(odd)))
    through = listed(edge_text(case, edge, timed=False) for edge in cycle[:3])
    all_ = ranks_of(component) if odd == component else f"{case.who(odd)} and {ranks_of(most)}"
    tail = f"; {ranks_wait(victims)} too" if victims and odd == component else ""
    return Finding(
        DEADLOCK,
        ERROR,
        lowered(0.95, missing),
        f"{all_} wait for each other for {time_text(wait.age_ns)}: {through}{tail}",
        tuple(_culprit(case, rank) for rank in odd),
        victims,
        wait.since_ns,
        " ".join(sorted({str(case.graph.waits[rank].comm) for rank in component})),
        (*(edge_text(case, edge) for edge in cycle[:_MOST_EDGES]), *_locks(case, component)),
        tuple(missing),
        (DEADLOCK.refuted_by,),
        DEADLOCK.next_steps,
        case.stacks(odd, victims),
    )


def _locks(case: Case, component: tuple[int, ...]) -> list[str]:
    wanting = [rank for rank in component if case.graph.waits[rank].op == FILE_LOCK]
    return [f"rank {rank}: {case.activity(rank).why}" for rank in wanting[:_MOST_EDGES]]


def _culprit(case: Case, rank: int) -> Culprit:
    own, place, wait = case.culprit(rank), site(case, rank), case.graph.waits[rank]
    sequence = case.sequences.get(wait.comm) if wait.comm is not None else None
    number = sequence.number(rank, wait.seq) if sequence else wait.seq
    why = f"it waits in {operation_text(case, wait.comm, wait.op, number)}"
    return Culprit(rank, own.node, own.pid, f"{why}, in {place}" if place else why, own.activity)
