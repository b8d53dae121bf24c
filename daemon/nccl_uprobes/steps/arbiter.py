"""Decides, from the runs of the optimizer, whether a period of the collectives is a step or a micro-step.

A job that accumulates gradients without ``no_sync`` reduces them in every micro-step. If it calls no other collective
once per step, each micro-step has the operations of a step. Only the optimizer runs once for several micro-steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from probing.daemon.nccl_uprobes.steps.collective_steps import Step

__all__ = ("Arbiter",)

_MAX_MARKS = 4096
# The maximum number of periods that are held back until the optimizer has run.
_MAX_HELD = 512
# The number of periods per step is concluded from _FEW consecutive runs of the optimizer with the same number of
# periods between them, or from _MANY runs if at least the share _MOST of them has the same number.
_FEW, _MANY, _MOST = 3, 8, 0.8
_RECENT = 32
# The maximum number of runs of the optimizer that may be missed or late.
_MISSED = 8
_CONFIDENCE, _CONFIRMED = 0.95, 0.9


class Arbiter:
    """Makes steps from the periods of one process and the runs of its optimizer.

    ``periods``: the number of periods in a step. 1: each period is a step; 0: the optimizer's runs do not show the
    number; None: unknown so far. As long as no optimizer was seen, no period is held back.
    """

    def __init__(self) -> None:
        self.periods: int | None = None
        self._marks: deque[int] = deque(maxlen=_MAX_MARKS)
        self._held: deque[Step] = deque()
        self._group: list[Step] = []
        self._whole = False
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        # The times of runs of the optimizer, and of begins of periods, that ``_count`` has still to compare.
        self._runs: deque[int] = deque(maxlen=_MAX_MARKS)
        self._begins: deque[int] = deque(maxlen=_MAX_MARKS)
        self._since = self._until = 0
        self._counts: deque[int] = deque(maxlen=_MANY)

    def ran(self, ends: Iterable[int]) -> None:
        """Adds runs of the optimizer. ``ends``: the times of their last calls, CLOCK_MONOTONIC ns."""
        for t in ends:
            self._marks.append(t)
            self._runs.append(t)

    def judge(self, periods: Iterable[Step], running: bool) -> list[Step]:
        """Adds periods that have ended. Returns the steps that are now certain.

        ``running``: an optimizer has been seen, so its next run may show whether the periods are steps.
        """
        for step in periods:
            if step.t_start != self._until:
                # This period does not directly follow the period before it.
                self._since = step.t_start
            self._until = step.t_end
            self._begins.append(step.t_start)
            self._held.append(step)
        self._count()
        before, self.periods = self.periods, self._verdict()
        if (self.periods or 0) > 1:
            if (before or 0) <= 1:
                self._group, self._whole = [], False
            return self._merged(self.periods or 1)
        waits = self.periods is None and running and len(self._held) < _MAX_HELD
        if waits:
            return []
        if self.periods is None and running:
            self.periods = 0
        steps = [_confirmed(step) if self.periods == 1 else step for step in self._held]
        self._held.clear()
        return steps

    def _count(self) -> None:
        while len(self._runs) > 1 and self._runs[1] < self._until:
            first, last = self._runs.popleft(), self._runs[0]
            while self._begins and self._begins[0] <= first:
                self._begins.popleft()
            if self._since <= first:
                self._counts.append(sum(first < begin <= last for begin in self._begins))

    def _verdict(self) -> int | None:
        latest = [*self._counts][-_FEW:]
        if len(latest) == _FEW and len(set(latest)) == 1:
            return latest[0]
        if self.periods is None and len(self._counts) == _MANY:
            often, times = Counter(self._counts).most_common(1)[0]
            return often if times >= _MOST * _MANY else 0
        return self.periods

    def _merged(self, periods: int) -> list[Step]:
        steps = []
        while self._held:
            step = self._held[0]
            while self._marks and self._marks[0] < step.t_start:
                self._marks.popleft()
            if not self._marks and len(self._held) < min(_MISSED * periods, _MAX_HELD):
                # Until the optimizer's next run is seen, it is unknown whether the optimizer ran in this period.
                break
            self._group.append(self._held.popleft())
            # When the optimizer is no longer seen, steps keep their number of periods.
            ended = self._marks[0] < step.t_end if self._marks else len(self._group) >= periods
            if ended or len(self._group) >= _MAX_HELD:
                if self._whole or len(self._group) == periods:
                    steps += self._together(periods)
                self._group, self._whole = [], True
        return steps

    def _together(self, periods: int) -> list[Step]:
        """Returns the steps between two runs of the optimizer. There are several if the optimizer skipped steps, for
        example because a loss overflowed.
        """
        size = periods if len(self._group) % periods == 0 else len(self._group)
        return [self._step(self._group[at : at + size], periods) for at in range(0, len(self._group), size)]

    def _step(self, group: list[Step], periods: int) -> Step:
        exact = len(group) == periods and all(step.exact for step in group)
        self._recent.append(exact)
        known = [step.comm_ns for step in group if step.comm_ns is not None]
        waits = [step.wait_ns for step in group if step.wait_ns is not None]
        return group[0]._replace(
            t_end=group[-1].t_end,
            ops=sum(step.ops for step in group),
            comm_ns=sum(known) if len(known) == len(group) else None,
            elapsed=max(round(sum(step.elapsed for step in group) / periods), 1),
            exact=exact,
            confidence=round(_CONFIDENCE * sum(self._recent) / len(self._recent), 3),
            periods=len(group),
            wait_ns=sum(waits) if len(waits) == len(group) else None,
        )


def _confirmed(step: Step) -> Step:
    confidence = max(step.confidence, _CONFIRMED) if step.exact else step.confidence
    return step._replace(confidence=confidence, confirmed=True)
