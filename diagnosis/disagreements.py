"""Majorities among ranks, and collectives whose calls differ between ranks: in name, reduction, root, dtype or size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from probing.diagnosis.facts import Operation, Rank
from probing.diagnosis.sequences import Sequence, Signature, signature
from probing.diagnosis.wait_graph import WaitGraph
from probing.diagnosis.waits import INIT, is_p2p

__all__ = ("KINDS", "Disagreement", "Pattern", "disagreements", "ended_badly", "pattern_of", "vote")

_V = TypeVar("_V", bound=Hashable)
_LONGEST_PERIOD = 32


@dataclass(frozen=True)
class _Vote(Generic[_V]):
    """The values of ranks. ``groups``: values and their ranks, the largest group first. ``tied``: the two largest
    groups have the same size.
    """

    groups: tuple[tuple[_V, tuple[int, ...]], ...]

    @property
    def tied(self) -> bool:
        return len(self.groups) > 1 and len(self.groups[0][1]) == len(self.groups[1][1])

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks outside of the largest group."""
        return tuple(sorted(rank for _, ranks in self.groups[1:] for rank in ranks))


def vote(values: Mapping[int, _V]) -> _Vote[_V]:
    """Returns the groups of equal values; groups of the same size are in the order of their lowest ranks."""
    groups: dict[_V, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return _Vote(tuple((value, tuple(ranks)) for value, ranks in ordered))


@dataclass(frozen=True)
class Pattern:
    """The usual calls on a communicator. ``usual``: the call of most ranks, by number. ``period``: the number of calls
    after which the pattern repeats; 0: it does not repeat. ``last``: the highest number in ``usual``.
    """

    usual: Mapping[int, Signature]
    period: int
    last: int

    def expected(self, number: int) -> Signature | None:
        """Returns the collective that the job usually calls under ``number``; None if unknown."""
        if number in self.usual and number <= self.last:
            return self.usual[number]
        if not self.period or number <= self.last:
            return None
        back = -(-(number - self.last) // self.period) * self.period
        return self.usual.get(number - back)


def pattern_of(sequence: Sequence, before: int) -> Pattern:
    """Returns the pattern of the collectives below number ``before``. Numbers without a majority are left out."""
    found: dict[int, Counter[Signature]] = {}
    for own in sequence.numbers.values():
        for number, one in own.items():
            if number < before:
                found.setdefault(number, Counter())[signature(one)] += 1
    usual = {number: calls[0][0] for number, votes in found.items() if not _tied(calls := votes.most_common(2))}
    last = max(usual, default=0)
    return Pattern(usual, _period(usual, last), last)


def _tied(calls: list[tuple[Signature, int]]) -> bool:
    return len(calls) > 1 and calls[0][1] == calls[1][1]


def _period(usual: Mapping[int, Signature], last: int) -> int:
    # Returns the shortest period that holds for its last two repetitions, and for at least the last four numbers.
    for period in range(1, _LONGEST_PERIOD + 1):
        span = range(last, last - max(period, 4), -1)
        if all(n in usual and usual[n] == usual.get(n - period) for n in span):
            return period
    return 0


KINDS = ("operation", "root", "dtype", "size")
_ENDED_BADLY = ("failed", "abandoned")
# Operations to which ranks may contribute different sizes.
_ANY_SIZE = frozenset(("all_to_all", "scatter", "gather"))


@dataclass(frozen=True)
class Disagreement:
    """A collective whose calls differ. ``kind``: the first of KINDS that differs; ``votes``: the ranks, grouped by
    their value of this kind.

    ``odd``: the ranks to blame; empty: undecided. They are the minority. If no majority is certain, they are the ranks
    that depart from the sequence that the job repeats (``by_pattern``). ``open``: the ranks that wait in the
    collective. ``number``: None if only stacks show the calls.
    """

    comm: str
    number: int | None
    kind: str
    votes: _Vote[str]
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
    """Returns the disagreements in the collectives in which ranks wait, and in collectives of ``bad`` that were the
    last call of their rank.
    """
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
        # If the job went on after the failure, the cause no longer matters.
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
    # Compares ranks that wait in collectives of one group. The sequence numbers are unknown, because only stacks show
    # these calls.
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
    votes: _Vote[str], calls: dict[int, Operation], pattern: Pattern | None, number: int | None, unseen: int
) -> tuple[tuple[int, ...], bool]:
    # Ranks that were not seen may belong to the minority.
    if len(votes.groups[0][1]) > len(votes.groups[1][1]) + unseen:
        return votes.odd, False
    expected = pattern.expected(number) if pattern is not None and number is not None else None
    usual = [ranks for _, ranks in votes.groups if expected is not None and signature(calls[ranks[0]]) == expected]
    if len(usual) != 1:
        return (), False
    return tuple(sorted(rank for _, ranks in votes.groups if ranks is not usual[0] for rank in ranks)), True
