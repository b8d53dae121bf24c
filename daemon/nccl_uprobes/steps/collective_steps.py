"""Detects the training steps of one process from the repeating sequence of its collectives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.steps.operation_history import WINDOW, History
from probing.daemon.nccl_uprobes.steps.period import Period, find_period, places, signatures

__all__ = ("Step", "StepDetector")

Array = npt.NDArray[Any]
_Waits = Callable[[Array], tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]
_FIRST_SEARCH = 8
# A search is due when new operations amount to 1/_SHARE of the known operations; after the pattern was lost, to
# 1/_SHARE_AFTER_LOSS.
_SHARE, _SHARE_AFTER_LOSS = 2, 8
# When the window is full, the minimum time between two searches, ns: the time between the calls of the newest operation
# at each search.
_REST_NS = 10_000_000_000
# The number of latest steps whose share of exact steps enters the confidence.
_RECENT = 32
# Up to this many operations of a step are added up without numpy.
_FEW = 64
# A pattern that repeats faster than this is no training step, ns.
_TOO_FAST_NS = 100_000
_MIN_FIT = 0.6
# Once this many steps have had more or fewer operations than the pattern, a longer pattern is searched for.
_ODD_STEPS = 3
# Limits of the number of operations after the last occurrence of the pattern, as (lengths, operations): ``lengths``
# times the length of the pattern, plus ``operations``. Above _RESTLESS another pattern is searched for; above _PATIENCE
# the present pattern is given up.
_RESTLESS = (4, 32)
_PATIENCE = (16, 1024)
# The confidence in a pattern of one operation, in a pattern of several, and in a doubtful pattern of several.
_ONE_OPERATION, _SEVERAL, _DOUBTFUL = 0.5, 0.95, 0.75


class Step(NamedTuple):
    """A training step that has ended. Times are CLOCK_MONOTONIC ns.

    ``elapsed``: 1 plus the number of steps missed since the previous step. ``exact``: the step has exactly the
    operations of the pattern. ``comm`` and ``seq``: communicator and sequence number of the step's first operation, -1
    if unknown. ``comm_ns``: the time in which at least one of its operations ran. ``wait_ns``: the part of ``comm_ns``
    in which the rank waited for other ranks on its node, None if unknown. ``period``: None if only the optimizer showed
    the step. ``periods``: the number of periods in the step. ``confirmed``: the optimizer runs once per period.

    ``confidence``: the share of the last 32 steps that were exact, times the confidence in the pattern: 0.95; 0.75 if
    the pattern encloses a shorter pattern, lies in a longer one or has varying sizes; 0.5 if it has a single signature.
    """

    t_start: int
    t_end: int
    ops: int
    comm_ns: int | None
    elapsed: int
    exact: bool
    confidence: float
    comm: int
    seq: int
    period: Period | None
    periods: int = 1
    confirmed: bool = False
    wait_ns: int | None = None


class StepDetector:
    """Detects the steps of one process. ``turn`` rotates a new period, so that it begins with the same operation on all
    ranks; ``waits`` returns the wait of each operation, and a mask of the operations whose wait is known.

    ``period``: the period in use; None while there is none.
    """

    def __init__(self, turn: Callable[[Period], Period], waits: _Waits) -> None:
        self.turn, self.waits = turn, waits
        self._history = History()
        self._search_at = _FIRST_SEARCH
        self._searched = 0
        self._recent: list[bool] = []
        self._odd = 0
        self._odd_since = 0
        self._odd_search = _ODD_STEPS
        # The end of the last step that was returned, the mean duration of a step, and its period.
        self._last: tuple[int, float, Period] | None = None
        self._skipped = 0
        self.period: Period | None = None

    @property
    def newest(self) -> int:
        """The time when the last operation was called, CLOCK_MONOTONIC ns; -1 without operations."""
        known = self._history.operations
        return int(known["t"][-1]) if len(known) else -1

    def observe(self, operations: Array) -> list[Step]:
        """Adds ``operations``, in the order of their calls. Returns the steps that have ended.

        A step is returned once all operations of the next step were seen, since the operations of a step can end in any
        order.
        """
        self._history.add(operations)
        if self.period is None:
            self._search()
        return self._follow(self.period) if self.period is not None else []

    def _search(self) -> None:
        history = self._history
        if history.added < self._search_at or not len(history.waiting):
            return
        newest = int(history.waiting["t"][-1])
        if len(history.operations) >= WINDOW and newest - self._searched < _REST_NS:
            return
        self._searched = newest
        # The intervals between searches grow, so that all searches together cost only a few times as much as the last
        # one.
        known = len(history.operations)
        share = _SHARE_AFTER_LOSS if self._last is not None else _SHARE
        self._search_at = history.added + (max(known // share, 4) if known < WINDOW else known)
        waiting = history.waiting
        # After the pattern was lost, the waiting operations may begin with a whole validation, which has no steps. So
        # their last parts are searched, too.
        for part in (1, 4, 16) if self._last is not None else (1,):
            begin = len(waiting) - len(waiting) // part
            if len(waiting) - begin >= _FIRST_SEARCH and (period := find_period(waiting[begin:])) is not None:
                self._lock(period, begin)
                return

    def _lock(self, period: Period, begin: int) -> None:
        self.period = period = self.turn(period)
        waiting = self._history.waiting
        starts = places(signatures(waiting, period.varying), period.pattern)
        if len(starts):
            # The pattern may have repeated without a break since before ``begin``, where the searched part starts.
            breaks = np.flatnonzero(np.diff(starts) > _RESTLESS[0] * len(period.pattern))
            breaks = breaks[starts[breaks] < begin]
            first = int(starts[breaks[-1] + 1 if len(breaks) else 0])
            self._skipped = self._steps_in(waiting[:first], int(waiting["t"][first]))
            self._history.at += first
        self._recent = [True]
        self._odd, self._odd_search = 0, _ODD_STEPS

    def _steps_in(self, gap: Array, until: int) -> int:
        """Returns the number of steps between the last returned step and ``until``, at most as many as fit into
        ``gap``.
        """
        if self._last is None:
            return 0
        end, each, period = self._last
        signed = signatures(gap, period.varying)
        fitting = int(np.isin(signed, period.pattern).sum()) // len(period.pattern)
        return max(min(round((until - end) / max(each, 1.0)), fitting), len(_walk(signed, period.pattern)[0]))

    def _follow(self, period: Period) -> list[Step]:
        waiting = self._history.waiting
        starts, without = _walk(signatures(waiting, period.varying), period.pattern)
        if len(starts) > 1:
            each = (waiting["t"][starts[-1][0]] - waiting["t"][starts[0][0]]) / (len(starts) - 1)
            if each < _TOO_FAST_NS:
                self._history.at += starts[-1][0]
                self._lose()
                return []
        steps = self._steps(period, waiting, starts)
        if starts:
            self._history.at += starts[-1][0]
        if steps:
            each = (steps[-1].t_end - steps[0].t_start) / len(steps)
            self._last = (steps[-1].t_end, each, period)
        restless, lost = (without > repeats * len(period.pattern) + more for repeats, more in (_RESTLESS, _PATIENCE))
        if lost or sum(self._recent) / len(self._recent) < _MIN_FIT:
            self._lose()
        elif restless:
            self._search()
        elif self._odd >= self._odd_search:
            self._search_longer(period)
        return steps

    def _lose(self) -> None:
        self.period = None
        self._search_at = self._history.added + _FIRST_SEARCH

    def _search_longer(self, period: Period) -> None:
        """Searches for a longer pattern: operations between the steps may mean that the steps are micro-steps."""
        self._odd_search = 2 * self._odd
        known = self._history.operations
        recent = known[np.searchsorted(known["t"], self._odd_since) :]
        more = find_period(recent) if len(recent) >= _FIRST_SEARCH else None
        if more is None or len(more.pattern) <= len(period.pattern):
            return
        inside = len(places(np.concatenate((more.pattern, more.pattern[: len(period.pattern) - 1])), period.pattern))
        if inside * len(period.pattern) < len(more.pattern):
            self.period = self.turn(more)

    def _steps(self, period: Period, waiting: Array, starts: list[tuple[int, bool]]) -> list[Step]:
        """Returns the steps between consecutive ``starts``. Each start is a pair: index in ``waiting``, and whether the
        step is exact.
        """
        edges = [start for start, _ in starts]
        waits = self._waits_between(waiting, edges)
        t, kinds, seqs = (waiting[name][edges].tolist() for name in ("t", "kind", "seq"))
        worth, steps = _worth(period), []
        for n, ((begin, exact), (end, _)) in enumerate(pairwise(starts)):
            inside = waiting[begin:end]
            comm_ns, wait_ns = _covered(inside), waits[n]
            self._recent = [*self._recent, exact][-_RECENT:]
            if len(inside) != len(period.pattern):
                self._odd_since = self._odd_since if self._odd else t[n]
                self._odd += 1
            elapsed, self._skipped = 1 + self._skipped, 0
            confidence = round(sum(self._recent) / len(self._recent) * worth, 3)
            steps.append(
                Step(
                    t[n],
                    t[n + 1],
                    len(inside),
                    comm_ns,
                    elapsed,
                    exact,
                    confidence,
                    comm=kinds[n] >> 16,
                    seq=seqs[n],
                    period=period,
                    wait_ns=None if comm_ns is None or wait_ns is None else min(comm_ns, wait_ns),
                )
            )
        return steps

    def _waits_between(self, waiting: Array, edges: list[int]) -> list[int | None]:
        """Returns for each pair of neighbours in ``edges`` the sum of the waits of the operations between them; None if
        no wait is known.
        """
        if len(edges) < 2:
            return []
        inside, at = waiting[edges[0] : edges[-1]], np.array(edges) - edges[0]
        each, known = self.waits(inside)
        sums, counts = (np.diff(np.concatenate(([0], np.cumsum(values)))[at]) for values in (each, known))
        return [ns if count else None for ns, count in zip(sums.tolist(), counts.tolist(), strict=True)]


def _worth(period: Period) -> float:
    """Returns the confidence in steps that all match the pattern of ``period``."""
    if bool((period.pattern == period.pattern[0]).all()):
        return _ONE_OPERATION
    return _DOUBTFUL if period.inner > 1 or period.enclosing or len(period.varying) else _SEVERAL


def _walk(signed: npt.NDArray[np.uint64], pattern: npt.NDArray[np.uint64]) -> tuple[list[tuple[int, bool]], int]:
    """Returns (index at which the step begins, whether the step is exact) for each step, and the number of operations
    after the last step.
    """
    length, at = len(pattern), 0
    starts: list[tuple[int, bool]] = []
    copies = places(signed, pattern)
    while at + length <= len(signed):
        whole = signed[at : at + (len(signed) - at) // length * length].reshape(-1, length)
        wrong = np.flatnonzero((whole != pattern).any(axis=1))
        run = int(wrong[0]) if len(wrong) else len(whole)
        starts += [(at + n * length, True) for n in range(run)]
        at += run * length
        if at + length > len(signed):
            break
        later = copies[np.searchsorted(copies, at) :]
        if not len(later):
            return starts, len(signed) - at
        starts += [(at + start, False) for start in _between(signed[at : later[0]], pattern)]
        at = int(later[0])
    return starts, 0


def _between(signed: npt.NDArray[np.uint64], pattern: npt.NDArray[np.uint64]) -> list[int]:
    """Returns the indexes at which inexact steps begin. ``signed``: the operations between two exact steps."""
    starts: list[int] = []
    position, begin = 0, -1
    for index, sign in enumerate(signed.tolist()):
        if sign == pattern[position]:
            begin = index if position == 0 else begin
            position += 1
            if position == len(pattern):
                starts.append(begin)
                position = 0
    if starts or len(signed) > 2 * len(pattern):
        return starts
    known = np.flatnonzero(np.isin(signed, pattern))
    return [int(known[0])] if len(known) * 2 >= len(pattern) else []


def _covered(operations: Array) -> int | None:
    """Returns the time in which at least one operation ran, ns; None if a start or an end is unknown."""
    if len(operations) <= _FEW:
        return _covered_by_few(operations["begin"].tolist(), operations["end"].tolist())
    if bool((operations["begin"] < 0).any() or (operations["end"] < 0).any()):
        return None
    order = np.argsort(operations["begin"], kind="stable")
    begin, end = operations["begin"][order], np.maximum.accumulate(operations["end"][order])
    before = np.concatenate((begin[:1], end[:-1]))
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())


def _covered_by_few(begins: list[int], ends: list[int]) -> int | None:
    """Returns the same as ``_covered``. For few operations this loop costs less than calls of numpy."""
    if min(begins) < 0 or min(ends) < 0:
        return None
    covered, until = 0, 0
    for begin, end in sorted(zip(begins, ends, strict=True)):
        if end > until:
            covered += end - max(begin, until)
            until = end
    return covered
