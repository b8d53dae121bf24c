"""Finds the point at which the durations of a series became longer and stayed so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("ChangePoint", "change_point")

MIN_BEFORE = 20
MIN_AFTER = 10
RATIO = 1.3
_MOST_VALUES = 1024
# Standard deviation of a normal distribution, in median absolute deviations.
_NORMAL = 1.4826
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """``index``: of the first value after the change. ``before`` and ``after``: the medians."""

    index: int
    before: float
    after: float


def change_point(values: Sequence[float], *, after: int = MIN_AFTER, ratio: float = RATIO) -> ChangePoint | None:
    """Returns where ``values`` became longer by ``ratio``, for at least ``after`` values up to the last one.

    None: they did not, or a tenth of the earlier values were as long, or a tenth of the later ones as short.
    """
    series = np.asarray(values[-_MOST_VALUES:], np.float64)
    if len(series) < MIN_BEFORE + after:
        return None
    # A cheap test for the usual case: nothing changed.
    if np.median(series[-after:]) < ratio / 1.1 * np.quantile(series, min(0.1, MIN_BEFORE / 2 / len(series))):
        return None
    index = _split(series, MIN_BEFORE)
    if index > len(series) - after:
        return None
    old, new = series[:index], series[index:]
    before, now = float(np.median(old)), float(np.median(new))
    if before <= 0 or now < ratio * before:
        return None
    deviation = _NORMAL * float(np.median(np.abs(old - before)))
    least = max(before + 3 * deviation, before * (1 + (ratio - 1) / 2))
    if (new > least).mean() < _NEARLY_ALL or (old < (before + now) / 2).mean() < _NEARLY_ALL:
        return None
    return ChangePoint(index + max(0, len(values) - len(series)), before, now)


def _split(series: npt.NDArray[np.float64], first: int) -> int:
    """Returns the index, at least ``first``, that splits the series into the two most uniform parts."""
    costs = [_cost(series[:index]) + _cost(series[index:]) for index in range(first, len(series))]
    return first + int(np.argmin(costs))


def _cost(part: npt.NDArray[np.float64]) -> float:
    return float(np.abs(part - np.median(part)).sum())
