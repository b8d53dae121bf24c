"""The rows of a table that a query can need. Only this module decides whether a segment is read at all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

__all__ = ("EVER", "Need", "Range")


class Range(NamedTuple):
    """A range of times, UTC ns, both ends included. None: the range is open at this end."""

    low: int | None = None
    high: int | None = None

    def holds(self, first: int, last: int) -> bool:
        """Returns whether the range contains a time between ``first`` and ``last``."""
        return (self.low is None or last >= self.low) and (self.high is None or first <= self.high)

    def both(self, other: Range) -> Range:
        """Returns the intersection of this range and ``other``."""
        return Range(_pick(max, self.low, other.low), _pick(min, self.high, other.high))

    def either(self, other: Range) -> Range:
        """Returns the smallest range that contains this range and ``other``."""
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Range(low, high)


EVER = Range()


class Need(NamedTuple):
    """The rows whose ``ts`` is in ``times`` and whose job is in ``jobs`` (None: any job)."""

    times: Range = EVER
    jobs: frozenset[str] | None = None

    def holds(self, first: int, last: int, jobs: Collection[str] | None) -> bool:
        """Returns whether a segment may have a needed row, if its ``ts`` are from ``first`` to ``last`` and its jobs
        are ``jobs`` (None: unknown)."""
        if self.jobs is not None and jobs is not None and self.jobs.isdisjoint(jobs):
            return False
        return self.times.holds(first, last)

    def either(self, other: Need) -> Need:
        """Returns a need that covers the rows of this need and of ``other``."""
        jobs = None if self.jobs is None or other.jobs is None else self.jobs | other.jobs
        return Need(self.times.either(other.times), jobs)

    def packed(self) -> list[object]:
        """Returns the need as JSON values; ``api.typed`` turns them into a Need again."""
        return [self.times, None if self.jobs is None else sorted(self.jobs)]


def _pick(choose: Callable[[int, int], int], one: int | None, two: int | None) -> int | None:
    if one is None or two is None:
        return one if two is None else two
    return choose(one, two)
