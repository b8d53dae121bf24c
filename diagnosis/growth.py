"""Finds ranks whose memory grows steadily, and when it reaches a limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from probing.api.text import size
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank, Series

__all__ = ("DEVICE", "RESIDENT", "Growth", "growths")

RESIDENT, DEVICE = "rss_bytes", "device_bytes"
MIN_POINTS = 20
MIN_GROWTH = 64 << 20
_MOST_POINTS = 1024
_STEADY = 0.8
_Cgroup = tuple[str, str | None, int]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Growth:
    """``rate``: bytes per ns. ``left_ns``: the time until ``limit``, a text for people; None if no limit is known.
    ``shared``: whether other processes use the same limit."""

    rank: Rank
    series: Series
    rate: float
    left_ns: float | None = None
    limit: str = ""
    shared: bool = False


def growths(case: Case, name: str) -> list[Growth]:
    """Returns the living ranks whose series ``name`` grows steadily, with the time until the nearest limit of each."""
    known = [(r, s) for r in case.facts.ranks if r.exit is None for s in r.series if s.name == name]
    growing = [Growth(rank, series, rate) for rank, series in known if (rate := _rate(series)) is not None]
    return _limited(case, name, growing)


def _rate(series: Series) -> float | None:
    """Returns the rate at which a series grows steadily, bytes per ns; None if it does not."""
    # All pairs of readings are compared, so there must not be too many.
    every = len(series.values) // _MOST_POINTS + 1
    values = np.array(series.values[::-every][::-1], np.float64)
    times = np.array(series.ts_ns[::-every][::-1], np.float64) - (series.ts_ns[0] if series.ts_ns else 0)
    if len(values) < MIN_POINTS or not np.isfinite(values).all():
        return None
    # A process that starts allocates memory: that is not counted.
    values, times = values[len(values) // 10 :], times[len(times) // 10 :]
    grown = values[-1] - values[0]
    if grown < max(MIN_GROWTH, 0.1 * values[0]):
        return None
    half = len(values) // 2
    rates = [_slope(values[half:], times[half:]), _slope(values, times)]
    rises = np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)].mean()
    return min(rates) if rises >= _STEADY and rates[0] >= rates[1] / 2 > 0 else None


def _slope(values: _Floats, times: _Floats) -> float:
    """Returns the median slope of all pairs of readings (Theil-Sen estimator), which outliers hardly change."""
    first, second = np.triu_indices(len(values), 1)
    apart = times[second] - times[first]
    found = (values[second] - values[first])[apart > 0] / apart[apart > 0]
    return float(np.median(found)) if len(found) else 0.0


def _limited(case: Case, name: str, growing: Sequence[Growth]) -> list[Growth]:
    """Returns ``growing`` with the time until the nearest limit of each."""
    if name == DEVICE:
        return [_until(g, g.series.limit, g.series.values[-1], g.rate, "of the device") for g in growing]
    available = {node.node: node.memory_available_bytes for node in case.facts.nodes}
    used: defaultdict[_Cgroup, float] = defaultdict(float)
    by_cgroup: defaultdict[_Cgroup, float] = defaultdict(float)
    by_node: defaultdict[str, float] = defaultdict(float)
    for rank in case.facts.ranks:
        used[_cgroup(rank)] += _resident(rank)
    for g in growing:
        by_cgroup[_cgroup(g.rank)] += g.rate
        by_node[g.rank.node] += g.rate
    found = []
    for g in growing:
        best, cgroup = g, _cgroup(g.rank)
        condition = g.rank.condition
        if condition is not None and condition.memory_limit_bytes:
            text = f"of its cgroup, {size(condition.memory_limit_bytes)}"
            best = _until(g, condition.memory_limit_bytes, used[cgroup], by_cgroup[cgroup], text)
        left = available.get(g.rank.node)
        if left is not None:
            whole = _until(g, left, 0, by_node[g.rank.node], "of the node", shared=True)
            best = min(best, whole, key=lambda one: one.left_ns if one.left_ns is not None else float("inf"))
        found.append(best)
    return found


def _until(g: Growth, limit: float | None, used: float, rate: float, text: str, *, shared: bool = False) -> Growth:
    if limit is None:
        return g
    return replace(g, left_ns=max(0.0, limit - used) / rate, limit=text, shared=shared)


def _cgroup(rank: Rank) -> _Cgroup:
    # If the cgroup is not known, each rank counts alone.
    cgroup = rank.condition.cgroup if rank.condition else None
    return rank.node, cgroup, rank.rank if cgroup is None else -1


def _resident(rank: Rank) -> float:
    return next((s.values[-1] for s in rank.series if s.name == RESIDENT and s.values), 0.0)
