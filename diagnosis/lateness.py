"""Finds ranks that persistently arrive last at collectives, and how long the other ranks wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np
import numpy.typing as npt

from probing.diagnosis.arrivals import Arrivals

__all__ = ("CLOCK_ERRORS", "MIN_LAG_NS", "MIN_OPERATIONS", "Late", "by_rank", "late_ranks")

MIN_OPERATIONS = 20
MIN_LAG_NS = 5_000_000
MIN_SHARE = 0.1
_LAST_IN = 0.6
CLOCK_ERRORS = 3
# The maximum accepted probability that a rank is last this often by chance. It is low because many jobs are judged each
# minute.
_BY_CHANCE = 1e-6
_SLOW_AS_THE_WORST = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """The lateness of ``ranks`` on a communicator. ``lag_ns``: the median lag of the worst rank. ``share``: the lost
    share of the time.

    ``of`` counts all operations. ``compared`` counts the operations that have a late rank, and in which the lags of
    ``ranks`` are known. ``last_in`` counts the compared operations in which one of ``ranks`` was the last.
    """

    arrivals: Arrivals
    ranks: tuple[int, ...]
    lag_ns: float
    share: float
    last_in: int
    compared: int
    of: int


def late_ranks(found: Iterable[Arrivals]) -> list[Late]:
    """Returns the late ranks of each communicator, except ranks that are late because they wait on another
    communicator.
    """
    late = [one for a in found if (one := _late(a)) is not None]
    kept = [(one, tuple(r for r in one.ranks if not _victim(r, one, late))) for one in late]
    return [replace(one, ranks=ranks) for one, ranks in kept if ranks]


def _late(a: Arrivals) -> Late | None:
    if len(a.seqs) < MIN_OPERATIONS or a.covered_ns <= 0:
        return None
    least = max(MIN_LAG_NS, CLOCK_ERRORS * a.error_ns)
    # No rank is late right after a collective that all ranks have left, so only collectives with a late rank count.
    rows = np.nanmax(a.lag_ns, axis=1) > least
    compared = int(rows.sum())
    if not compared or not _still(rows):
        return None
    lag, own = a.lag_ns[rows], a.own_ns[rows]
    medians = {r: m for column, r in enumerate(a.ranks) if (m := _median_if_late(own[:, column], least)) is not None}
    worst = max(medians.values(), default=0.0)
    slow = tuple(r for r, m in medians.items() if m >= _SLOW_AS_THE_WORST * worst)
    share = worst * compared / a.covered_ns
    if not slow or len(slow) > len(a.ranks) // 2 or share < MIN_SHARE:
        return None
    last, counted = _last_in(lag, a.ranks, slow)
    if last < _LAST_IN * counted or _chance(last, counted, len(slow) / len(a.ranks)) > _BY_CHANCE:
        return None
    return Late(a, slow, worst, min(share, 1.0), last, counted, len(a.seqs))


def _median_if_late(own: npt.NDArray[np.float64], least: float) -> float | None:
    """Returns the median of a rank's own lag if it is late in most operations; None otherwise."""
    known = own[np.isfinite(own)]
    if len(known) * 2 < len(own) or (known > least).mean() < _LAST_IN:
        return None
    return float(np.median(known))


def _still(rows: npt.NDArray[np.bool_]) -> bool:
    """Returns whether ranks are late in the newest quarter of the operations about as often as before."""
    newest = rows[-max(1, len(rows) // 4) :]
    return bool(newest.mean() >= rows.mean() / 3)


def _last_in(lag: npt.NDArray[np.float64], ranks: Sequence[int], slow: Sequence[int]) -> tuple[int, int]:
    """Returns the number of operations in which one of ``slow`` was the last, and the number of operations whose last
    rank is known.
    """
    columns = [ranks.index(r) for r in slow]
    rows = lag[np.isfinite(lag[:, columns]).all(axis=1)]
    if not len(rows):
        return 0, 0
    last = np.nanargmax(rows, axis=1)
    return int(np.isin(last, columns).sum()), len(rows)


def _chance(hits: int, of: int, each: float) -> float:
    """Returns the chance of at least ``hits`` hits in ``of`` tries, each with probability ``each``."""
    return float(sum(comb(of, k) * each**k * (1 - each) ** (of - k) for k in range(hits, of + 1)))


def _victim(rank: int, one: Late, late: Sequence[Late]) -> bool:
    """Returns whether ``rank`` waits on another communicator for a rank that is late there.

    If two ranks wait for each other on two communicators, both count as late by themselves.
    """
    for other in late:
        if other is one or rank in other.ranks or rank not in other.arrivals.ranks:
            continue
        if any(culprit not in one.arrivals.ranks or culprit in one.ranks for culprit in other.ranks):
            return True
    return False


def by_rank(late: Iterable[Late]) -> Mapping[int, Late]:
    """Returns, for each late rank, its lateness on the communicator that loses most by it."""
    found: dict[int, Late] = {}
    for one in late:
        for rank in one.ranks:
            if rank not in found or found[rank].share < one.share:
                found[rank] = one
    return found
