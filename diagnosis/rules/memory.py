"""The memory of a rank grows towards its limit, or is much larger than the memory of the other ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from probing.api.text import size, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank, Series
from probing.diagnosis.verdict import NOTE, WARNING, Culprit, Finding, Verdict
from probing.diagnosis.words import who

__all__ = ("VERDICTS", "find", "growths")

_RESIDENT, _DEVICE = "rss_bytes", "device_bytes"
MIN_POINTS = 20
MIN_GROWTH = 64 << 20
_MOST_POINTS = 1024
_STEADY = 0.8
_Cgroup = tuple[str, str | None, int]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Growth:
    """The growth of a rank's memory. ``rate``: bytes per ns. ``left_ns``: the time until the memory reaches its limit;
    None if no limit is known. ``limit``: a text that names the limit. ``shared``: whether other processes use the same
    limit."""

    rank: Rank
    series: Series
    rate: float
    left_ns: float | None = None
    limit: str = ""
    shared: bool = False


def growths(case: Case, name: str) -> list[_Growth]:
    """Returns the living ranks whose series ``name`` grows steadily, each with the time until it reaches its nearest
    limit.
    """
    known = [(r, s) for r in case.facts.ranks if r.exit is None for s in r.series if s.name == name]
    growing = [_Growth(rank, series, rate) for rank, series in known if (rate := _rate(series)) is not None]
    return _limited(case, name, growing)


def _rate(series: Series) -> float | None:
    """Returns the rate at which a series grows steadily, bytes per ns; None if it does not."""
    # All pairs of readings are compared, so readings are left out if there are many.
    every = len(series.values) // _MOST_POINTS + 1
    values = np.array(series.values[::-every][::-1], np.float64)
    times = np.array(series.ts_ns[::-every][::-1], np.float64) - (series.ts_ns[0] if series.ts_ns else 0)
    if len(values) < MIN_POINTS or not np.isfinite(values).all():
        return None
    # The first tenth is left out: a process that starts allocates memory.
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


def _limited(case: Case, name: str, growing: Sequence[_Growth]) -> list[_Growth]:
    """Returns ``growing``, each with the time until its nearest limit."""
    if name == _DEVICE:
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


def _until(g: _Growth, limit: float | None, used: float, rate: float, text: str, *, shared: bool = False) -> _Growth:
    if limit is None:
        return g
    return replace(g, left_ns=max(0.0, limit - used) / rate, limit=text, shared=shared)


def _cgroup(rank: Rank) -> _Cgroup:
    # If the cgroup is unknown, each rank counts separately.
    cgroup = rank.condition.cgroup if rank.condition else None
    return rank.node, cgroup, rank.rank if cgroup is None else -1


def _resident(rank: Rank) -> float:
    return next((s.values[-1] for s in rank.series if s.name == _RESIDENT and s.values), 0.0)


MEMORY_GROWTH = Verdict(
    "memory_growth",
    "memory",
    "The memory of a rank grows towards its limit",
    "The resident or device memory of a rank has grown steadily over 20 readings or more, by at least 64 MiB and a"
    " tenth, and in the second half of the readings at least half as fast as in all of them. At that rate it reaches"
    " the limit of its cgroup, node or device within an hour, and within ten times the time that was recorded.",
    "Readings of the rank's memory, and the limits.",
    "0.8; 0.6 for the limit of the node, which other processes share.",
    "The memory stops growing: a cache that is full, or an evaluation that ends.",
    (
        "Look for lists that keep tensors, losses with their graphs, or caches without a bound in that rank's code.",
        "Save a checkpoint before the memory ends.",
    ),
    situations=("memory_growth",),
)
MEMORY_IMBALANCE = Verdict(
    "memory_imbalance",
    "memory",
    "A rank has much more memory than the others",
    "The resident or device memory of a rank is at least 1.5 times the median of the others and 256 MiB more, and is"
    " stable: its last five readings differ by 5 % at most. Fewer than half of the ranks have as much.",
    "The last readings of the ranks' memory.",
    "0.8.",
    "The rank is meant to have more: it holds the data, or another part of the model.",
    ("Look for what only this rank keeps: tensors moved to one device, results gathered on one rank, or data.",),
    situations=("memory_imbalance",),
)
VERDICTS: tuple[Verdict, ...] = (MEMORY_GROWTH, MEMORY_IMBALANCE)

_KINDS = {_RESIDENT: "resident memory", _DEVICE: "device memory"}
_MIN_MORE = 256 << 20
_RATIO = 1.5
_HORIZON_NS = 3600e9
_TIMES_SEEN = 10
_LAST = 5
_SETTLED = 0.05
_MOST = 8


def find(case: Case) -> Iterator[Finding]:
    """Yields findings for each kind of memory: ranks whose memory grows, and ranks with more memory than the others."""
    living = [rank for rank in case.facts.ranks if rank.exit is None]
    for name in _KINDS:
        known = [(rank, series) for rank in living for series in rank.series if series.name == name]
        growing = growths(case, name)
        ending = [g for g in growing if _ends(g)]
        if ending:
            yield _growth(name, ending)
        elif unlimited := [g for g in growing if g.rank.condition is None]:
            yield _unlimited(name, unlimited)
        named = {g.rank.rank for g in ending}
        if more := [one for one in _more(known) if one[0].rank not in named]:
            yield _imbalance(name, more)


def _ends(g: _Growth) -> bool:
    seen = g.series.ts_ns[-1] - g.series.ts_ns[0]
    return g.left_ns is not None and g.left_ns <= min(_HORIZON_NS, _TIMES_SEEN * seen)


def _growth(name: str, ending: Sequence[_Growth]) -> Finding:
    soonest = min(ending, key=lambda g: g.left_ns or 0)
    one = len(ending) == 1
    names = who([g.rank for g in ending])
    does = f"{'runs' if one else 'run'} out of memory in about {time_text(int(soonest.left_ns or 0))}"
    return Finding(
        MEMORY_GROWTH,
        WARNING,
        0.6 if any(g.shared for g in ending) else 0.8,
        f"{names} {does}: {_KINDS[name]} grows by {_per_minute(soonest)}",
        culprits=tuple(Culprit(g.rank.rank, g.rank.node, g.rank.pid, _grows(name, g)) for g in ending),
        about=name,
        evidence=tuple(f"rank {g.rank.rank}: {_seen(g)}" for g in ending[:_MOST]),
        refuted_by=(MEMORY_GROWTH.refuted_by,),
        next_steps=MEMORY_GROWTH.next_steps,
    )


def _unlimited(name: str, growing: Sequence[_Growth]) -> Finding:
    """Returns a note about ranks whose memory grows, while the limits of their cgroups are unknown."""
    verb = "uses" if len(growing) == 1 else "use"
    return Finding(
        MEMORY_GROWTH,
        NOTE,
        0.5,
        f"{who([g.rank for g in growing])} {verb} more and more {_KINDS[name]}: {_per_minute(growing[0])}",
        about=f"{name} without a limit",
        evidence=tuple(f"rank {g.rank.rank}: {_grown(g)}" for g in growing[:_MOST]),
        missing=("the limits of the cgroups",),
    )


def _per_minute(g: _Growth) -> str:
    return f"{size(g.rate * 60e9)} a minute"


def _grows(name: str, g: _Growth) -> str:
    left = time_text(int(g.left_ns or 0))
    return f"its {_KINDS[name]} grows by {_per_minute(g)} and reaches the limit {g.limit}, in {left}"


def _seen(g: _Growth) -> str:
    return f"{_grown(g)}; the limit is that {g.limit}"


def _grown(g: _Growth) -> str:
    first, last = g.series.values[0], g.series.values[-1]
    took = time_text(g.series.ts_ns[-1] - g.series.ts_ns[0])
    return f"{size(first)} to {size(last)} in {took} ({len(g.series.values)} readings)"


def _more(known: Sequence[tuple[Rank, Series]]) -> list[tuple[Rank, float, float]]:
    """Returns (rank, its memory, the median of the others) for each rank with more memory than the others."""
    now = [(rank, median(series.values[-_LAST:])) for rank, series in known if _settled(series)]
    ordered = sorted(own for _, own in now)
    medians = ((rank, own, _median_without(ordered, own)) for rank, own in now if len(now) > 1)
    found = [one for one in medians if one[1] >= _RATIO * one[2] and one[1] - one[2] >= _MIN_MORE]
    return found if len(found) < max(2, len(now) / 2) else []


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values, at least two, when ``value`` is left out once."""
    left_out, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[at + (at >= left_out)] for at in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def _settled(series: Series) -> bool:
    """Returns whether the last readings are nearly equal: then the rank neither starts nor leaks."""
    last = series.values[-_LAST:]
    return len(last) == _LAST and max(last) - min(last) <= _SETTLED * max(last)


def _compared(own: float, usual: float) -> str:
    return f"{own / usual:.1f} times as much as the others" if usual > 0 else "and the others have none"


def _imbalance(name: str, more: Sequence[tuple[Rank, float, float]]) -> Finding:
    _, own, usual = max(more, key=lambda one: one[1])
    has = f"{who([r for r, _, _ in more])} {'has' if len(more) == 1 else 'have'}"
    return Finding(
        MEMORY_IMBALANCE,
        WARNING,
        0.8,
        f"{has} {size(own)} of {_KINDS[name]}, {_compared(own, usual)}",
        culprits=tuple(
            Culprit(r.rank, r.node, r.pid, f"it has {size(mine)} of {_KINDS[name]}, the others {size(others)}")
            for r, mine, others in more
        ),
        about=name,
        evidence=tuple(f"rank {r.rank}: {size(mine)}; median of the others {size(others)}" for r, mine, others in more),
        refuted_by=(MEMORY_IMBALANCE.refuted_by,),
        next_steps=MEMORY_IMBALANCE.next_steps,
    )
