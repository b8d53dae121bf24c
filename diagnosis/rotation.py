"""Lateness that moves between ranks, or that is over: what ``lateness`` does not call a slow rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from probing.diagnosis.arrivals import Arrivals
from probing.diagnosis.lateness import CLOCK_ERRORS, MIN_LAG_NS, MIN_OPERATIONS

__all__ = ("Burst", "Rotation", "burst_of", "rotation_of")

_MIN_SHARE = 0.2
# A rank that is last more often is a slow rank, or nearly.
_MOST_OFTEN = 0.6
_LEAST_OFTEN = 0.05
_BURST, _BURST_SHARE = 5, 0.3
_AFTER = 8
_ELSEWHERE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Of ``compared`` collectives with a late rank each of ``ranks`` was the last in some; ``often``: the most often.

    ``lag_ns``: the median lag of the last one. ``share``: of the time, lost. ``changes``: how often the last rank was
    another one than before.
    """

    arrivals: Arrivals
    ranks: tuple[int, ...]
    often: tuple[int, int]
    lag_ns: float
    share: float
    compared: int
    changes: int


@dataclass(frozen=True, slots=True, eq=False)
class Burst:
    """``rank`` was the last in ``count`` collectives with a late rank in a row, and in none of the ``after`` since.

    ``lasted_ns``: the time from the first to the last of them. ``ended_ns``: the call of the last one, on the common
    clock. ``share``: of the time, lost.
    """

    arrivals: Arrivals
    rank: int
    count: int
    after: int
    lasted_ns: int
    ended_ns: int
    share: float


def rotation_of(a: Arrivals) -> Rotation | None:
    """Returns the rotation of lateness among the ranks of a communicator; None if there is none that costs a fifth."""
    late, lags = _lasts(a)
    known = [(rank, lag) for rank, lag in zip(late, lags, strict=True) if rank is not None]
    if len(a.seqs) < MIN_OPERATIONS or len(known) < MIN_OPERATIONS or a.covered_ns <= 0:
        return None
    counts = Counter(rank for rank, _ in known)
    ranks = tuple(sorted(rank for rank, count in counts.items() if count >= _LEAST_OFTEN * len(known)))
    often = counts.most_common(1)[0]
    share = float(sum(lag for _, lag in known) / a.covered_ns)
    changes = sum(one[0] != other[0] for one, other in pairwise(known))
    # Two ranks take turns; of more, at least three do, so that it is no pair of slow ones.
    if len(ranks) < min(3, len(a.ranks)) or often[1] >= _MOST_OFTEN * len(known) or share < _MIN_SHARE:
        return None
    if changes < len(known) / 4:
        return None
    return Rotation(a, ranks, often, float(np.median([lag for _, lag in known])), min(share, 1.0), len(known), changes)


def burst_of(a: Arrivals) -> Burst | None:
    """Returns a time in which one rank was late and which is over; None if there was none that cost a third."""
    late, lags = _lasts(a)
    if len(a.seqs) < MIN_OPERATIONS or a.covered_ns <= 0:
        return None
    rows = [row for row, rank in enumerate(late) if rank is not None]
    runs = [(rank, list(own)) for rank, own in groupby(rows, key=lambda row: late[row])]
    for rank, run in sorted(runs, key=lambda one: -len(one[1])):
        share = sum(lags[row] for row in run) / a.covered_ns
        outside = sum(late[row] == rank for row in rows) - len(run)
        after = len(late) - 1 - run[-1]
        if rank is None or len(run) < _BURST or share < _BURST_SHARE:
            return None
        if after >= _AFTER and outside <= _ELSEWHERE * len(late) and rank not in late[run[-1] + 1 :]:
            return _burst(a, rank, run, after, share)
    return None


def _burst(a: Arrivals, rank: int, run: list[int], after: int, share: float) -> Burst:
    calls = np.nanmax(a.call_ns, axis=1)
    ended = a.newest_ns - round(float(np.nanmax(a.call_ns) - calls[run[-1]]))
    return Burst(a, rank, len(run), after, round(float(calls[run[-1]] - calls[run[0]])), ended, min(float(share), 1.0))


def _lasts(a: Arrivals) -> tuple[list[int | None], list[float]]:
    """Returns, for each collective, the rank that was late and last, and its lag; None and 0 if no rank was late."""
    least = max(MIN_LAG_NS, CLOCK_ERRORS * a.error_ns)
    lag = np.where(np.isfinite(a.own_ns), a.own_ns, -np.inf)
    columns, most = lag.argmax(axis=1), lag.max(axis=1)
    is_late: Iterable[bool] = most > least
    late = [a.ranks[column] if yes else None for column, yes in zip(columns, is_late, strict=True)]
    return late, [float(one) if one > least else 0.0 for one in most]
