"""The steps of one process, told by the word that its operations repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.steps.operation_history import WINDOW, History
from probing.daemon.nccl_uprobes.steps.period import Period, find_period, places, signatures

__all__ = ("Step", "StepClock")

Array = npt.NDArray[Any]
_FIRST_SEARCH = 8
# A search comes when so much of what is known is new; sooner where there were steps already.
_SHARE, _SHARE_AFTER_LOSS = 2, 8
# The least time between two searches of a full window, ns of the operations.
_REST_NS = 10_000_000_000
# Of the last so many steps, how many fit.
_RECENT = 32
# Operations of a step that are gone through one by one.
_FEW = 64
# Steps that have become so short are none.
_TOO_FAST_NS = 100_000
_MIN_FIT = 0.6
# Steps with other operations in them, since the word was found, before a larger word is looked for.
_ODD_STEPS = 3
# Operations without the word, in words and as many more: until another word is looked for, and until it is lost.
_RESTLESS = (4, 32)
_PATIENCE = (16, 1024)
# Confidence in words: one operation a step says little, several say more.
_ONE_OPERATION, _SEVERAL, _DOUBTFUL = 0.5, 0.95, 0.75


@dataclass(frozen=True, slots=True)
class Step:
    """``elapsed``: steps since the one before, 1 but where some were missed. ``exact``: it has the word's operations
    and no other. ``comm`` and ``seq`` are of its first operation, -1 where not known. Times are ns. ``periods``: of how
    many periods it is made; a step that the optimizer tells has none. ``confirmed``: the optimizer runs as often.

    ``confidence``: the share of the last 32 steps that were exact, times what the word is worth: 0.95; 0.75 where it
    encloses a smaller one, lies in a larger one or has sizes that vary; 0.5 where it is one signature only.
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


class StepClock:
    """Fed with a process's operations, gives the steps that have ended. ``turn`` may begin a period elsewhere."""

    def __init__(self, turn: Callable[[Period], Period]) -> None:
        self.turn = turn
        self._history = History()
        self._search_at = _FIRST_SEARCH
        self._searched = 0
        self._recent: list[bool] = []
        self._odd = 0
        self._odd_since = 0
        self._odd_search = _ODD_STEPS
        # Of the last step that was told: its end, how long a step took, its word.
        self._last: tuple[int, float, Period] | None = None
        self._skipped = 0
        self.period: Period | None = None

    @property
    def newest(self) -> int:
        """When the last operation that is known was called, ns; -1: none is known."""
        known = self._history.operations
        return int(known["t"][-1]) if len(known) else -1

    def observe(self, operations: Array) -> list[Step]:
        """Take ``operations``, in the order of their calls, into account.

        A step is told when all operations of the next one were seen, as those of one step end in any order.
        """
        self._history.add(operations)
        found: list[Step] = []
        if self.period is None:
            self._search()
        if self.period is not None:
            found += self._follow(self.period)
        return found

    def _search(self) -> None:
        history = self._history
        if history.added < self._search_at or not len(history.waiting):
            return
        newest = int(history.waiting["t"][-1])
        if len(history.operations) >= WINDOW and newest - self._searched < _REST_NS:
            return
        self._searched = newest
        # So that all searches together cost a few times what the last one does.
        known = len(history.operations)
        share = _SHARE_AFTER_LOSS if self._last is not None else _SHARE
        self._search_at = history.added + (max(known // share, 4) if known < WINDOW else known)
        waiting = history.waiting
        # After a word was lost, what comes next may be as long as a validation takes, and say nothing of the steps.
        for part in (1, 4, 16) if self._last is not None else (1,):
            begin = len(waiting) - len(waiting) // part
            if len(waiting) - begin >= _FIRST_SEARCH and (period := find_period(waiting[begin:])) is not None:
                self._lock(period, begin)
                return

    def _lock(self, period: Period, begin: int) -> None:
        self.period = period = self.turn(period)
        waiting = self._history.waiting
        starts = places(signatures(waiting, period.varying), period.word)
        if len(starts):
            # Back to where what was searched goes on from.
            breaks = np.flatnonzero(np.diff(starts) > _RESTLESS[0] * len(period.word))
            breaks = breaks[starts[breaks] < begin]
            first = int(starts[breaks[-1] + 1 if len(breaks) else 0])
            self._skipped = self._steps_in(waiting[:first], int(waiting["t"][first]))
            self._history.at += first
        self._recent = [True]
        self._odd, self._odd_search = 0, _ODD_STEPS

    def _steps_in(self, gap: Array, until: int) -> int:
        """How many steps lie between the last one told and ``until``: no more than ``gap`` has operations for."""
        if self._last is None:
            return 0
        end, each, period = self._last
        signed = signatures(gap, period.varying)
        fitting = int(np.isin(signed, period.word).sum()) // len(period.word)
        return max(min(round((until - end) / max(each, 1.0)), fitting), len(_walk(signed, period.word)[0]))

    def _follow(self, period: Period) -> list[Step]:
        waiting = self._history.waiting
        starts, without = _walk(signatures(waiting, period.varying), period.word)
        if len(starts) > 1:
            each = (waiting["t"][starts[-1][0]] - waiting["t"][starts[0][0]]) / (len(starts) - 1)
            if each < _TOO_FAST_NS:
                self._history.at += starts[-1][0]
                self._lose()
                return []
        found = self._steps(period, waiting, starts)
        if starts:
            self._history.at += starts[-1][0]
        if found:
            each = (found[-1].t_end - found[0].t_start) / len(found)
            self._last = (found[-1].t_end, each, period)
        restless, lost = (without > words * len(period.word) + more for words, more in (_RESTLESS, _PATIENCE))
        if lost or sum(self._recent) / len(self._recent) < _MIN_FIT:
            self._lose()
        elif restless:
            self._search()
        elif self._odd >= self._odd_search:
            self._look_for_more(period)
        return found

    def _lose(self) -> None:
        self.period = None
        self._search_at = self._history.added + _FIRST_SEARCH

    def _look_for_more(self, period: Period) -> None:
        """What comes between the steps may make them micro-steps of larger ones."""
        self._odd_search = 2 * self._odd
        known = self._history.operations
        recent = known[np.searchsorted(known["t"], self._odd_since) :]
        more = find_period(recent) if len(recent) >= _FIRST_SEARCH else None
        if more is None or len(more.word) <= len(period.word):
            return
        inside = len(places(np.concatenate((more.word, more.word[: len(period.word) - 1])), period.word))
        if inside * len(period.word) < len(more.word):
            self.period = self.turn(more)

    def _steps(self, period: Period, waiting: Array, starts: list[tuple[int, bool]]) -> list[Step]:
        """The steps between ``starts``; what is the same for all of them is looked up once."""
        edges = [start for start, _ in starts]
        t, kinds, seqs = (waiting[name][edges].tolist() for name in ("t", "kind", "seq"))
        worth, found = _worth(period), []
        for n, ((begin, exact), (end, _)) in enumerate(pairwise(starts)):
            inside = waiting[begin:end]
            self._recent = [*self._recent, exact][-_RECENT:]
            if len(inside) != len(period.word):
                self._odd_since = self._odd_since if self._odd else t[n]
                self._odd += 1
            elapsed, self._skipped = 1 + self._skipped, 0
            confidence = round(sum(self._recent) / len(self._recent) * worth, 3)
            found.append(
                Step(
                    t[n], t[n + 1], len(inside), _covered(inside), elapsed, exact, confidence,
                    comm=kinds[n] >> 16, seq=seqs[n], period=period,
                )
            )  # fmt: skip
        return found


def _worth(period: Period) -> float:
    """The confidence in steps of a word that all fit."""
    if bool((period.word == period.word[0]).all()):
        return _ONE_OPERATION
    return _DOUBTFUL if period.inner > 1 or period.enclosing or len(period.varying) else _SEVERAL


def _walk(signed: npt.NDArray[np.uint64], word: npt.NDArray[np.uint64]) -> tuple[list[tuple[int, bool]], int]:
    """(where steps begin and whether each is the word itself, how many operations came since the last)."""
    length, at = len(word), 0
    starts: list[tuple[int, bool]] = []
    copies = places(signed, word)
    while at + length <= len(signed):
        whole = signed[at : at + (len(signed) - at) // length * length].reshape(-1, length)
        wrong = np.flatnonzero((whole != word).any(axis=1))
        run = int(wrong[0]) if len(wrong) else len(whole)
        starts += [(at + n * length, True) for n in range(run)]
        at += run * length
        if at + length > len(signed):
            break
        later = copies[np.searchsorted(copies, at) :]
        if not len(later):
            return starts, len(signed) - at
        starts += [(at + start, False) for start in _between(signed[at : later[0]], word)]
        at = int(later[0])
    return starts, 0


def _between(signed: npt.NDArray[np.uint64], word: npt.NDArray[np.uint64]) -> list[int]:
    """Where the steps begin that lie between two exact ones: with other operations among theirs, or some missing."""
    starts: list[int] = []
    position, begin = 0, -1
    for index, sign in enumerate(signed.tolist()):
        if sign == word[position]:
            begin = index if position == 0 else begin
            position += 1
            if position == len(word):
                starts.append(begin)
                position = 0
    if starts or len(signed) > 2 * len(word):
        return starts
    known = np.flatnonzero(np.isin(signed, word))
    return [int(known[0])] if len(known) * 2 >= len(word) else []


def _covered(operations: Array) -> int | None:
    """Time in which at least one of the operations ran, ns; None where that of one is not known."""
    if len(operations) <= _FEW:
        return _covered_by_few(operations["begin"].tolist(), operations["end"].tolist())
    if bool((operations["begin"] < 0).any() or (operations["end"] < 0).any()):
        return None
    order = np.argsort(operations["begin"], kind="stable")
    begin, end = operations["begin"][order], np.maximum.accumulate(operations["end"][order])
    before = np.concatenate((begin[:1], end[:-1]))
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())


def _covered_by_few(begins: list[int], ends: list[int]) -> int | None:
    """The same; arrays of a few elements cost more than the work itself."""
    if min(begins) < 0 or min(ends) < 0:
        return None
    covered, until = 0, 0
    for begin, end in sorted(zip(begins, ends, strict=True)):
        if end > until:
            covered += end - max(begin, until)
            until = end
    return covered
