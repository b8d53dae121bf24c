"""Computes the lag of each rank at each collective, with corrected clocks.

A slow rank calls last and waits least. So its lag shows that it is slow, and the length of its waits does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.diagnosis.case import Case
from probing.diagnosis.clocks import SYNCHRONIZING, apart_ns
from probing.diagnosis.facts import Operation, Rank

__all__ = ("Arrivals", "arrivals")

Floats = npt.NDArray[np.float64]
# With more ranks than this, one rank hardly moves the median, so the median is computed once for all ranks.
_SMALL = 16
_POINT_TO_POINT = frozenset({"send", "recv"})


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """The collectives of a communicator for which calls of at least half of its members, and of two ranks, were
    recorded.

    Rows are collectives (``seqs``), columns are ``ranks``; unknown values are NaN. ``call_ns``: the times of the calls
    on the common clock, since the first call. ``lag_ns``: the time of the call minus the median of the other ranks'
    calls. ``own_ns``: the lag minus the excess wait of the rank. The excess wait is how much longer than the other
    ranks it waited on other communicators before the call. ``error_ns``: how far the clocks of two ranks may differ.
    """

    comm: str
    ranks: tuple[int, ...]
    size: int
    seqs: npt.NDArray[np.int64]
    call_ns: Floats
    lag_ns: Floats
    own_ns: Floats
    error_ns: int
    newest_ns: int

    @property
    def covered_ns(self) -> float:
        """The time from the first to the last collective."""
        middle = np.nanmedian(self.call_ns, axis=1)
        return float(middle.max() - middle.min()) if len(middle) else 0.0


def arrivals(case: Case) -> list[Arrivals]:
    """Returns the arrivals at the collectives of each communicator on which two or more ranks recorded calls."""
    waits = _Waits(case)
    by_comm: dict[str, dict[int, dict[int, Operation]]] = {}
    for rank in case.facts.ranks:
        for o in rank.done:
            if o.op not in SYNCHRONIZING or o.seq is None or o.t_call_ns is None:
                continue
            if (number := case.number(rank.rank, o.comm, o.seq)) is not None:
                by_comm.setdefault(o.comm, {}).setdefault(rank.rank, {})[number] = o
    found = (_arrivals(case, comm, by_rank, waits) for comm, by_rank in by_comm.items() if len(by_rank) > 1)
    return [one for one in found if one is not None]


def _arrivals(case: Case, comm: str, by_rank: Mapping[int, Mapping[int, Operation]], waits: _Waits) -> Arrivals | None:
    ranks = tuple(sorted(by_rank))
    communicator = case.communicators.get(comm)
    size = max(len(ranks), (communicator.size or len(communicator.members)) if communicator else 0)
    seqs = np.array(sorted({seq for own in by_rank.values() for seq in own}), np.int64)
    calls = np.full((len(seqs), len(ranks)), np.nan)
    waited = np.full(calls.shape, np.nan)
    first = min(case.time(r, o.t_call_ns or 0) for r in ranks for o in by_rank[r].values())
    for column, r in enumerate(ranks):
        rows = np.searchsorted(seqs, sorted(by_rank[r]))
        own = [by_rank[r][seq] for seq in sorted(by_rank[r])]
        calls[rows, column] = [case.time(r, o.t_call_ns or 0) - first for o in own]
        waited[rows, column] = waits.before(case.ranks[r], comm, own)
    known = np.isfinite(calls).sum(axis=1)
    kept = known >= max(2, (size + 1) // 2)
    if not kept.any():
        return None
    calls, waited = calls[kept], waited[kept]
    lag = _less_median(calls)
    # A rank may be late because it waited longer than the others on other communicators, so this excess is subtracted.
    own_lag = lag - np.maximum(0.0, _less_median(waited))
    nodes = sorted({case.ranks[r].node for r in ranks})
    error = max((apart_ns(case.clocks, a, b) for a in nodes for b in nodes[:_SMALL]), default=0)
    newest = first + int(np.nanmax(calls))
    return Arrivals(comm, ranks, size, seqs[kept], calls, lag, own_lag, error, newest)


def _less_median(values: Floats) -> Floats:
    """Returns each value minus the median of the other values in its row."""
    if values.shape[1] > _SMALL:
        return np.asarray(values - _median(values)[:, None])
    columns = [values[:, c] - _median(np.delete(values, c, axis=1)) for c in range(values.shape[1])]
    return np.stack(columns, axis=1)


def _median(values: Floats) -> Floats:
    found = np.full(len(values), np.nan)
    some = np.isfinite(values).any(axis=1)
    found[some] = np.nanmedian(values[some], axis=1)
    return found


class _Waits:
    """The time that ranks waited for other ranks in operations. The time of each rank is measured on its own clock.

    The wait of a rank is the duration of its operation less the shortest duration of this operation on any member.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        # By communicator and number: the shortest duration, and the number of known durations.
        self._shortest: dict[tuple[str, int | None], tuple[int, int]] = {}
        for rank in case.facts.ranks:
            for o in rank.done:
                if o.seq is None or o.op in _POINT_TO_POINT or (took := _took(o)) is None:
                    continue
                if (number := case.number(rank.rank, o.comm, o.seq)) is not None:
                    least, known = self._shortest.get((o.comm, number), (took, 0))
                    self._shortest[o.comm, number] = min(least, took), known + 1

    def before(self, rank: Rank, comm: str, own: Sequence[Operation]) -> list[float]:
        """Returns, for each of ``own``, how long ``rank`` waited on other communicators before its call, ns.

        ``own``: operations of ``comm``, sorted by seq. Only waits since the end of the previous operation of ``comm``
        count.
        """
        others = [o for o in rank.done if o.comm != comm]
        if not others:
            return [0.0] * len(own)
        times, sums = self._sums(rank.rank, others)
        ends = np.array(
            sorted(o.t_done_ns for o in rank.done if o.comm == comm and o.t_done_ns is not None), np.float64
        )
        calls = np.array([o.t_call_ns for o in own], np.float64)
        place = np.searchsorted(ends, calls, side="right") - 1
        since = np.where(place >= 0, ends[place] if len(ends) else calls, np.concatenate([calls[:1], calls[:-1]]))
        found: Any = np.interp(calls, times, sums) - np.interp(since, times, sums)
        return [float(value) for value in found]

    def _sums(self, rank: int, operations: Sequence[Operation]) -> tuple[list[float], list[float]]:
        """Returns times, and the total wait until each of these times: a curve that rises while the rank waits."""
        times, sums, total, end = [0.0], [0.0], 0.0, 0.0
        for begin, length in sorted((float(o.t_call_ns or 0), self._wait(rank, o)) for o in operations):
            start, stop = max(begin, end), max(begin + length, end)
            if stop > start:
                times += [start, stop]
                sums += [total, total + stop - start]
                total, end = sums[-1], stop
        return times, sums

    def _wait(self, rank: int, o: Operation) -> float:
        took = _took(o)
        if took is None:
            return 0.0
        least, known = self._shortest.get((o.comm, self._case.number(rank, o.comm, o.seq)), (took, 0))
        # If no other rank can be compared, the whole duration may have been a wait.
        return float(took - least) if known > 1 and o.op not in _POINT_TO_POINT else float(took)


def _took(o: Operation) -> int | None:
    return None if o.t_call_ns is None or o.t_done_ns is None else max(0, o.t_done_ns - o.t_call_ns)
