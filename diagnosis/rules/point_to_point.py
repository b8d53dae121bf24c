"""A send or receive has no counterpart, because its peer waits for the same rank in another operation."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import cycles, doubts, edge_text, longest_wait, lowered, oldest, operation_text, site
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.wait_graph import Edge
from probing.diagnosis.waits import is_p2p

__all__ = ("VERDICTS", "find")

_MOST_EDGES = 8

UNMATCHED = Verdict(
    "unmatched_p2p",
    "hang",
    "A send or a receive has no counterpart",
    "A rank waits in a send or receive, and its peer waits for this rank in another operation, so it never calls the"
    " counterpart. A cycle of sends and receives only is a `deadlock`.",
    "The wait of both sides, and the cycle through which they wait for each other.",
    "0.9; less where operations were lost or the peer was not seen.",
    "The peer's send or receive for this rank, in flight or called later.",
    (
        "Compare the condition around the send or receive on the named rank with that around its counterpart.",
        "Check the order of sends, receives and collectives on both ranks.",
    ),
    ("branch",),
)
VERDICTS = (UNMATCHED,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each cycle of waits that has both collectives and sends or receives."""
    for component in cycles(case):
        alone = [rank for rank in component if is_p2p(case.graph.waits[rank].op)]
        if alone and len(alone) < len(component):
            yield _finding(case, component, alone)


def _finding(case: Case, component: tuple[int, ...], alone: list[int]) -> Finding:
    pending = {rank: case.graph.pending[rank] for rank in alone}
    edges = [one.edge(rank, awaited) for rank, one in pending.items() for awaited in sorted(one.awaited & {*component})]
    first = oldest(case, edges)
    age, since = longest_wait(case, (first.waiter,))
    victims = tuple(sorted((set(component) | set(case.graph.victims(component))) - set(alone)))
    missing = doubts(case, component, alone)
    verb = "sends to" if first.op == "send" else "receives from"
    cycle = case.graph.cycle(component)
    back = next((edge for edge in cycle if edge.waiter == first.awaited), None)
    other = f" in {operation_text(case, back.comm, back.op, back.seq)}" if back is not None else ""
    culprits = tuple(_culprit(case, edge) for edge in edges)
    return Finding(
        UNMATCHED,
        ERROR,
        lowered(0.9, missing),
        f"{case.who((first.waiter,))} {verb} rank {first.awaited} for {time_text(age)}, and rank {first.awaited} waits"
        f" for it{other}: {ranks_of(component)} wait for each other",
        tuple({c.rank: c for c in culprits}.values()),
        victims,
        since,
        f"{first.comm} {first.waiter} {first.awaited}",
        tuple(edge_text(case, edge) for edge in cycle[:_MOST_EDGES]),
        tuple(missing),
        (UNMATCHED.refuted_by,),
        UNMATCHED.next_steps,
        case.stacks(alone, victims),
    )


def _culprit(case: Case, edge: Edge) -> Culprit:
    own, place = case.culprit(edge.waiter), site(case, edge.waiter)
    verb = "sends to" if edge.op == "send" else "receives from"
    why = f"it {verb} rank {edge.awaited}, which has no counterpart{f', in {place}' if place else ''}"
    return Culprit(edge.waiter, own.node, own.pid, why, own.activity)
