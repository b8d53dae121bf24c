"""Ranks wait for ranks whose processes are gone, or whose nodes do not answer."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import Unseen, doubts, hold_ups, lowered, operation_text, unseen
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.words import clean, exit_text, ranks_wait

__all__ = ("UNREACHABLE", "VERDICTS", "ended", "find")

DEAD = Verdict(
    "rank_dead",
    "hang",
    "A rank is gone, and the others wait for it",
    "Ranks wait in an operation for a rank whose process is gone, and `rank_died` does not explain it.",
    "The operation that the others wait in, and the last state of the process.",
    "0.9; 0.7 where the end of the process was not seen.",
    "The process, alive under its pid.",
    ("Look at the end of that rank's log, and at the kernel's log of its node.", "Restart the job."),
    ("dead_rank",),
)
UNREACHABLE = Verdict(
    "rank_unreachable",
    "hang",
    "A rank is on a node that does not answer, and the others wait for it",
    "Ranks wait in an operation, and all ranks that were seen have joined it. The other members of the communicator are"
    " on nodes that did not answer.",
    "The operation, and the nodes that did not answer.",
    "0.7; less where operations were lost.",
    "An answer of the node with the rank in that operation.",
    ("Check whether the node is up and its daemon runs: `probingctl nodes`.", "Ask again with all nodes."),
    ("unreachable_node",),
)
VERDICTS = (DEAD, UNREACHABLE)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each hold-up by ranks that are gone, and for each hold-up by unreachable ranks."""
    explained = case.explained
    for hold_up in hold_ups(case):
        gone = [rank for rank in hold_up.ranks if ended(case, rank) and rank not in explained]
        if gone:
            call = operation_text(case, hold_up.edge.comm, hold_up.edge.op, hold_up.edge.seq)
            names = case.who(gone)
            missing = doubts(case, gone, hold_up.waiters)
            seen = all(case.ranks[rank].exit is not None for rank in gone)
            yield Finding(
                DEAD,
                ERROR,
                lowered(0.9 if seen else 0.7, missing),
                f"{names} {'is' if len(gone) == 1 else 'are'} gone: {ranks_wait(hold_up.victims)} for"
                f" {time_text(hold_up.age_ns)}",
                tuple(case.culprit(rank) for rank in gone),
                hold_up.victims,
                hold_up.since_ns,
                f"{hold_up.edge.comm} {hold_up.edge.seq}",
                (f"{ranks_wait(hold_up.waiters)} in {call}", *(_state(case, rank) for rank in gone)),
                tuple(missing),
                (DEAD.refuted_by,),
                DEAD.next_steps,
                case.stacks((), hold_up.waiters),
            )
    for place in unseen(case):
        yield from _unreachable(case, place)


def ended(case: Case, rank: int) -> bool:
    """Returns whether the process of ``rank`` has ended."""
    own = case.ranks[rank]
    return own.exit is not None or own.state in ("exited", "zombie")


def _state(case: Case, rank: int) -> str:
    end = case.ranks[rank].exit
    return f"rank {rank}: its process {exit_text(end) if end else f'is {case.ranks[rank].state}'}"


def _unreachable(case: Case, place: Unseen) -> Iterator[Finding]:
    away = [rank for rank in place.unknown if rank not in case.ranks]
    silent = [m for m in case.facts.missing if m.kind == "node"]
    if not silent or not away or len(away) < len(place.unknown) or place.unidentified:
        return
    places = {m.rank: m.node for m in silent}
    nodes = sorted({m.node for m in silent if m.node})
    names = f"{ranks_of(away)} (node {clean(nodes[0])})" if len(nodes) == 1 else ranks_of(away)
    culprits = tuple(
        Culprit(rank, places.get(rank) or (nodes[0] if len(nodes) == 1 else ""), 0, "its node does not answer")
        for rank in away
    )
    missing = doubts(case, (), place.waiters)
    yield Finding(
        UNREACHABLE,
        ERROR,
        lowered(0.7, missing[1:]),
        f"{names} cannot be reached: {ranks_wait(place.victims)} for {time_text(place.age_ns)}",
        culprits,
        place.victims,
        place.since_ns,
        f"{place.comm} {place.number}",
        (place.text, *(clean(m.text) for m in silent)),
        tuple(missing),
        (UNREACHABLE.refuted_by,),
        UNREACHABLE.next_steps,
        case.stacks((), place.waiters),
    )
