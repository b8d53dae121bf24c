"""Hold-ups: ranks that are, or may be, at the ends of the wait-for graph; texts and confidence of findings
about waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from probing.api.text import plural, ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.wait_graph import Edge
from probing.diagnosis.waits import FILE_LOCK, INIT, main_thread
from probing.diagnosis.words import call_text, clean, frame_text, ranks_wait

__all__ = (
    "HoldUp",
    "Unseen",
    "cycles",
    "destroyed_text",
    "doubts",
    "edge_text",
    "hold_ups",
    "longest_wait",
    "lowered",
    "oldest",
    "operation_text",
    "place_text",
    "site",
    "unseen",
)

_LEAST = 0.3


@dataclass(frozen=True, slots=True)
class HoldUp:
    """A hold-up: ``ranks`` wait for no rank, and ``victims`` wait for them. ``edge``: the oldest wait, which lasts
    ``age_ns``.

    ``age_ns`` and ``since_ns`` are None if unknown.
    """

    ranks: tuple[int, ...]
    victims: tuple[int, ...]
    edge: Edge
    since_ns: int | None
    age_ns: int | None
    waiters: tuple[int, ...]
    """The victims that wait directly for one of ``ranks``."""


def hold_ups(case: Case) -> list[HoldUp]:
    """Returns the hold-ups, by their number of victims, the largest first. Ranks that are missing in one operation form
    one hold-up.
    """
    graph = case.graph
    by_call: dict[tuple[str | None, int | None, str | None], set[int]] = {}
    for one in graph.operations:
        if ends := one.awaited & graph.sinks:
            by_call.setdefault((one.comm, one.seq, one.op), set()).update(ends)
    found = []
    for group in _joined(by_call.values()):
        pending = [(one, min(one.awaited & group)) for one in graph.awaiting(group)]
        # For a store or a new communicator it is not known which ranks are awaited, so another operation is preferred.
        known = [(one, first) for one, first in pending if one.op != INIT] or pending
        edge = oldest(case, (one.edge(rank, first) for one, first in known for rank in one.waiters))
        wait = longest_wait(case, (edge.waiter,))
        waiters = tuple(sorted(rank for one, _ in pending for rank in one.waiters))
        victims = graph.victims(group)
        found.append(HoldUp(tuple(sorted(group)), victims, edge, wait.since_ns, wait.age_ns, waiters))
    return sorted(found, key=lambda h: (-len(h.victims), h.ranks))


def cycles(case: Case) -> list[tuple[int, ...]]:
    """Returns the sets of ranks that wait for each other. A set in which a rank waits in a store, or for others to
    create a communicator, does not count if the set also waits for a sink of the graph. Perhaps only that sink is
    missing."""
    graph = case.graph
    return [
        component
        for component in graph.components()
        if all(graph.waits[rank].op != INIT for rank in component)
        or not any(one.awaited & graph.sinks for one in graph.pending_of(component))
    ]


def _joined(parts: Iterable[set[int]]) -> Iterator[set[int]]:
    """Yields the unions of the sets that share members."""
    groups: dict[int, set[int]] = {}
    for ranks in parts:
        touching = {id(group): group for rank in ranks if (group := groups.get(rank)) is not None}
        largest = max(touching.values(), key=len, default=set[int]())
        for group in (ranks, *touching.values()):
            if group is not largest:
                largest |= group
                groups |= dict.fromkeys(group, largest)
    yield from {id(group): group for group in groups.values()}.values()


def oldest(case: Case, edges: Iterable[Edge]) -> Edge:
    """Returns the edge of the rank that has waited longest."""
    return min(edges, key=lambda e: (-(case.wait_ns(e.waiter) or 0), str(e.comm), e.waiter, e.awaited))


class _LongestWait(NamedTuple):
    """The longest wait. ``since_ns`` is on the common clock. Both fields are None if unknown."""

    age_ns: int | None
    since_ns: int | None


def longest_wait(case: Case, ranks: Iterable[int]) -> _LongestWait:
    """Returns the longest wait of ``ranks``."""
    ages = [(age, rank) for rank in ranks if (age := _age(case, rank)) is not None]
    if not ages:
        return _LongestWait(None, None)
    age, rank = max(ages, key=lambda a: a[0])
    return _LongestWait(age, case.time(rank, case.now(rank) - age))


def _age(case: Case, rank: int) -> int | None:
    # Waits for file locks are only in the graph, not in ``case.waits``.
    wait = case.graph.waits.get(rank)
    if wait is not None and wait.op == FILE_LOCK and wait.since_ns is not None:
        return max(0, case.now(rank) - wait.since_ns)
    return case.wait_ns(rank)


def site(case: Case, rank: int) -> str | None:
    """Returns the innermost frame of a rank's own code, such as "evaluate, train.py:60"; None without a stack."""
    own = case.ranks.get(rank)
    main = main_thread(own) if own else None
    frames = [f for f in main.frames if not f.native and "torch/" not in f.file] if main else []
    return frame_text(frames[0]) if frames else None


def operation_text(case: Case, comm: str | None, op: str | None, seq: int | None) -> str:
    """Returns a text such as "all_reduce seq 7 of default_pg", or "all_reduce seq 7 of tp (NAME)" if the role of the
    communicator is known.
    """
    if op == INIT:
        return "the creation of a communicator"
    if op == FILE_LOCK:
        return "a call for the lock of a file"
    return call_text(op, _group_text(case, comm), seq)


def place_text(case: Case, comm: str | None, seq: int | None) -> str:
    """Returns a text such as "at seq 7 of default_pg", or "on default_pg" if the number is unknown."""
    name = clean(_group_text(case, comm))
    return f"on {name}" if seq is None else f"at seq {seq} of {name}"


def _group_text(case: Case, comm: str | None) -> str:
    if comm is None:
        return "an unknown group"
    known = case.communicators.get(comm)
    name = known.name if known and known.name else comm
    # torch numbers groups that have no name.
    name = f"group {name}" if name.isdigit() else name
    return f"{known.role} ({name})" if known and known.role not in (None, "unknown", "world") else name


def destroyed_text(case: Case, rank: int, comm: str | None) -> str:
    """Returns a text such as "rank 1 has destroyed default_pg 12 s ago"; empty if it has not."""
    left = (w for w in case.ranks[rank].witnesses if (w.source, w.comm, w.state) == ("probe", comm, "destroyed"))
    witness = next(left, None)
    if witness is None:
        return ""
    ago = f" {time_text(max(0, case.now(rank) - witness.ts_ns))} ago" if witness.ts_ns is not None else ""
    return f"rank {rank} has destroyed {clean(_group_text(case, comm))}{ago}"


def edge_text(case: Case, edge: Edge, *, timed: bool = True) -> str:
    """Returns a text such as "rank 0 waits in all_reduce seq 5 of tp for rank 1 for 12 s"; without the time if not
    ``timed``.
    """
    call = operation_text(case, edge.comm, edge.op, edge.seq)
    tail = f" for {time_text(case.wait_ns(edge.waiter))}" if timed else ""
    if edge.op == FILE_LOCK:
        return f"rank {edge.waiter} waits for the lock of a file that rank {edge.awaited} holds"
    return f"rank {edge.waiter} waits in {call} for rank {edge.awaited}{tail}"


def doubts(case: Case, ranks: Iterable[int], waiters: Iterable[int]) -> list[str]:
    """Returns the gaps in the facts about ``ranks`` and about the operations in which ``waiters`` wait."""
    found = []
    own, waiting = sorted(set(ranks)), sorted(set(waiters))
    if lossy := [r for r in (*own, *waiting) if r in case.ranks and case.ranks[r].lost]:
        found.append(f"operations of {ranks_of(lossy)} were lost")
    if unseen := [r for r in own if r in case.ranks and not case.ranks[r].threads]:
        found.append(f"no stack of {ranks_of(unseen)}")
    pending = case.graph.pending_of(waiting)
    if unknown := {rank for one in pending for rank in one.unknown}:
        found.append(f"nothing shows whether {ranks_of(unknown)} joined")
    if unidentified := max((one.unidentified for one in pending), default=0):
        verb = "was" if unidentified == 1 else "were"
        found.append(f"{plural(unidentified, 'member')} of the communicator {verb} not seen")
    if late := [r for r in waiting if r in case.waits and "probe" not in case.waits[r].witnesses]:
        unseen_from = any(case.ranks[r].seen_from_ns is not None for r in late)
        why = ": it began before it could be seen" if unseen_from else ""
        found.append(f"only the stack of {ranks_of(late)} shows the operation{why}")
    return found


def lowered(base: float, found: Iterable[str]) -> float:
    """Returns the confidence ``base``, lowered for each doubt in ``found``."""
    return max(_LEAST, round(base - 0.12 * len(list(found)), 2))


@dataclass(frozen=True, slots=True)
class Unseen:
    """An operation in which ``waiters`` wait. ``unknown``: the ranks that may not have joined it. ``unidentified``: the
    number of members whose ranks are unknown. ``age_ns`` and ``since_ns``: None if unknown."""

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
    """Returns the operations that ranks may not have joined, the oldest first, except those whose waiters a finding
    explains.
    """
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
