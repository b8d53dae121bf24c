"""Majorities among ranks, and the sequence of collectives that a job repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from probing.diagnosis.sequences import Sequence, Signature, signature

__all__ = ("Pattern", "Vote", "pattern_of", "vote")

_V = TypeVar("_V", bound=Hashable)
_LONGEST_PERIOD = 32


@dataclass(frozen=True)
class Vote(Generic[_V]):
    """``groups``: values and their ranks, the largest group first. ``tied``: the two largest are of one size."""

    groups: tuple[tuple[_V, tuple[int, ...]], ...]

    @property
    def tied(self) -> bool:
        return len(self.groups) > 1 and len(self.groups[0][1]) == len(self.groups[1][1])

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks outside of the largest group."""
        return tuple(sorted(rank for _, ranks in self.groups[1:] for rank in ranks))


def vote(values: Mapping[int, _V]) -> Vote[_V]:
    """Returns the groups of equal values; groups of one size in the order of their lowest ranks."""
    groups: dict[_V, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return Vote(tuple((value, tuple(ranks)) for value, ranks in ordered))


@dataclass(frozen=True)
class Pattern:
    """``usual``: what most ranks of a communicator called, by number. ``period``: after how many calls it repeats; 0:
    it does not. ``last``: the highest number in ``usual``."""

    usual: Mapping[int, Signature]
    period: int
    last: int

    def expected(self, number: int) -> Signature | None:
        """Returns the collective that the job usually calls as ``number``; None if not known."""
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
    # The shortest period that holds for its last two repetitions, and for at least the last four numbers.
    for period in range(1, _LONGEST_PERIOD + 1):
        span = range(last, last - max(period, 4), -1)
        if all(n in usual and usual[n] == usual.get(n - period) for n in span):
            return period
    return 0
