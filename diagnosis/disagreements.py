"""Finds collectives whose calls differ between ranks: in name, reduction, root, dtype or size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from probing.diagnosis.facts import Operation, Rank
from probing.diagnosis.sequences import Sequence, signature
from probing.diagnosis.votes import Pattern, Vote, pattern_of, vote
from probing.diagnosis.wait_graph import WaitGraph
from probing.diagnosis.waits import INIT, is_p2p

__all__ = ("KINDS", "Disagreement", "disagreements", "ended_badly")

KINDS = ("operation", "root", "dtype", "size")
_ENDED_BADLY = ("failed", "abandoned")
# Their ranks may contribute different sizes.
_ANY_SIZE = frozenset(("all_to_all", "scatter", "gather"))


@dataclass(frozen=True)
class Disagreement:
    """A collective whose calls differ. ``kind``: the first of KINDS that differs; ``votes``: its values, by rank.

    ``odd``: the ranks to blame, which are the minority or, if no majority is certain, those that depart from the
    sequence that the job repeats (``by_pattern``); empty: undecided. ``open``: the ranks that wait in it. ``number``:
    None if only stacks show the calls.
    """

    comm: str
    number: int | None
    kind: str
    votes: Vote[str]
    calls: dict[int, Operation]
    odd: tuple[int, ...]
    by_pattern: bool
    open: tuple[int, ...]
    pattern: Pattern | None = None


def ended_badly(ranks: Iterable[Rank]) -> list[tuple[int, Operation]]:
    """Returns the collectives that failed, or were in flight when their process ended, each with its rank."""
    return [
        (rank.rank, one)
        for rank in ranks
        for one in rank.done
        if one.state in _ENDED_BADLY and one.seq is not None and not is_p2p(one.op)
    ]


def disagreements(
    graph: WaitGraph, sequences: Mapping[str, Sequence], bad: Iterable[tuple[int, Operation]]
) -> list[Disagreement]:
    """Returns the disagreements in collectives that ranks wait in for long, or that failed last (``bad``)."""
    suspects = _suspects(graph, sequences, bad)
    found = [d for comm, number in suspects if (d := _at(graph, sequences[comm], number)) is not None]
    return [*found, *_by_stacks(graph, sequences)]


def _suspects(
    graph: WaitGraph, sequences: Mapping[str, Sequence], bad: Iterable[tuple[int, Operation]]
) -> list[tuple[str, int]]:
    found: dict[tuple[str, int], None] = {}
    for rank, wait in graph.waits.items():
        if wait.comm is not None and not is_p2p(wait.op) and (sequence := sequences.get(wait.comm)):
            number = sequence.number(rank, wait.seq)
            if number is not None:
                found[wait.comm, number] = None
    for rank, one in bad:
        number = sequences[one.comm].number(rank, one.seq)
        # If the job went on after the failure, its cause no longer matters.
        if number is not None and number >= sequences[one.comm].called.get(rank, number):
            found[one.comm, number] = None
    return list(found)


def _at(graph: WaitGraph, sequence: Sequence, number: int) -> Disagreement | None:
    calls = sequence.at(number)
    if len({(signature(one), one.root) for one in calls.values()}) < 2:
        return None
    waiting = tuple(r for r in sorted(calls) if (w := graph.waits.get(r)) is not None and w.comm == sequence.comm)
    unseen = max(len(sequence.members) + sequence.unidentified - len(calls), 0)
    return _compared(sequence.comm, number, calls, waiting, pattern_of(sequence, number), unseen)


def _by_stacks(graph: WaitGraph, sequences: Mapping[str, Sequence]) -> Iterator[Disagreement]:
    # Ranks in collectives of one group that only stacks show.
    groups: dict[str, dict[int, Operation]] = {}
    for rank, wait in graph.waits.items():
        sequence = sequences.get(wait.comm) if wait.comm is not None else None
        counted = sequence is not None and sequence.counted and wait.seq is not None
        if wait.comm is None or counted or wait.op in (None, INIT) or is_p2p(wait.op) or not wait.firm:
            continue
        one = Operation(wait.comm, None, wait.op, wait.since_ns, dtype=wait.dtype, count=wait.count)
        groups.setdefault(wait.comm, {})[rank] = one
    for comm, calls in groups.items():
        sequence = sequences.get(comm)
        lacks = any(one.awaited or one.unknown for one in graph.pending_of(calls))
        if len(calls) > 1 and not lacks and (sequence is None or set(sequence.members) == set(calls)):
            found = _compared(comm, None, calls, tuple(sorted(calls)), None, 0)
            if found is not None:
                yield found


def _compared(
    comm: str,
    number: int | None,
    calls: dict[int, Operation],
    waiting: tuple[int, ...],
    pattern: Pattern | None,
    unseen: int,
) -> Disagreement | None:
    for kind in KINDS:
        values = {rank: value for rank, one in calls.items() if (value := _value(one, kind)) is not None}
        votes = vote(values)
        if len(votes.groups) > 1:
            odd, by_pattern = _odd(votes, calls, pattern, number, unseen)
            return Disagreement(comm, number, kind, votes, calls, odd, by_pattern, waiting, pattern)
    return None


def _value(one: Operation, kind: str) -> str | None:
    if kind == "operation":
        return f"{one.op} ({one.redop})" if one.op and one.redop else one.op
    if kind == "root":
        return None if one.root is None else f"root {one.root}"
    if kind == "dtype":
        return one.dtype
    return None if one.count is None or one.op in _ANY_SIZE else f"{one.count} elements"


def _odd(
    votes: Vote[str], calls: dict[int, Operation], pattern: Pattern | None, number: int | None, unseen: int
) -> tuple[tuple[int, ...], bool]:
    # Ranks that were not seen may belong to the minority.
    if len(votes.groups[0][1]) > len(votes.groups[1][1]) + unseen:
        return votes.odd, False
    expected = pattern.expected(number) if pattern is not None and number is not None else None
    usual = [ranks for _, ranks in votes.groups if expected is not None and signature(calls[ranks[0]]) == expected]
    if len(usual) != 1:
        return (), False
    return tuple(sorted(rank for _, ranks in votes.groups if ranks is not usual[0] for rank in ranks)), True
