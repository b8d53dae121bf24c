"""Which number a step has: the same on all ranks of a job on this node, and the job's own where a variable tells it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, deque

from probing.daemon.nccl_uprobes.steps.collective_steps import Step
from probing.daemon.nccl_uprobes.steps.period import Period, least_rotation

__all__ = ("Calibration", "JobSteps")

_REMEMBERED = 4096
_MAX_WORDS = 64
_SIGHTS = 8
_ENOUGH = 3
_MAX_WAITING = 64


class JobSteps:
    """What the ranks of one job agree on: where in the period a step begins, and how steps are counted."""

    def __init__(self) -> None:
        self._begins: OrderedDict[tuple[tuple[int, int], ...], int] = OrderedDict()
        self._by_operation: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._by_time: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def turn(self, period: Period) -> Period:
        """``period``, begun where the first rank that had it begins it."""
        abstract = period.abstract
        least = least_rotation(abstract)
        name = tuple(abstract[least:] + abstract[:least])
        if len(self._begins) >= _MAX_WORDS:
            self._begins.popitem(last=False)
        begin = self._begins.setdefault(name, -least % len(abstract))
        return period.rotated((least + begin) % len(abstract))

    def number(self, step: Step, before: int | None) -> int:
        """The number of a step whose predecessor in the same process has ``before``; negative: it is before step 0.

        Where that says little, ranks are matched by the operation that the step begins with, which has the same
        sequence number on all of them, else by time.
        """
        number = None if before is None else before + step.elapsed
        if number is None or step.elapsed != 1:
            number = self._elsewhere(step, number)
        if step.seq >= 0 and step.comm:
            self._by_operation[step.comm, step.seq] = number
            if len(self._by_operation) > _REMEMBERED:
                self._by_operation.popitem(last=False)
        if not self._by_time or step.t_start > self._by_time[-1][0]:
            self._by_time.append((step.t_start, number))
        return number

    def _elsewhere(self, step: Step, own: int | None) -> int:
        if step.seq >= 0 and (step.comm, step.seq) in self._by_operation:
            return max(self._by_operation[step.comm, step.seq], -1 if own is None else own - step.elapsed + 1)
        if own is not None or not self._by_time:
            return own or 0
        known = list(self._by_time)
        near = known[max(bisect_right(known, (step.t_start, _REMEMBERED)) - 1, 0) :][:2]
        t, number = min(near, key=lambda each: abs(each[0] - step.t_start))
        return number + round((step.t_start - t) / max(step.t_end - step.t_start, 1))


class Calibration:
    """What to add to the numbers of one process's steps to get the values of its variable ``step``."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque(maxlen=_MAX_WAITING)
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=_MAX_WAITING)
        self._sights: deque[int] = deque(maxlen=_SIGHTS)
        self.offset: int | None = None

    def sight(self, t: int, value: int) -> None:
        """The variable was first seen to be ``value`` at ``t``, ns."""
        for t_start, t_end, number in self._ended:
            if t_start <= t < t_end:
                self._conclude(value - number)
                return
        self._waiting.append((t, value))

    def ended(self, t_start: int, t_end: int, number: int) -> None:
        """Step ``number`` is over, with all that was seen during it."""
        self._ended.append((t_start, t_end, number))
        while self._waiting and self._waiting[0][0] < t_end:
            t, value = self._waiting.popleft()
            if t >= t_start:
                self._conclude(value - number)

    def _conclude(self, offset: int) -> None:
        """The variable changes somewhere within a step, so single sights are off by one; what most of them say holds,
        and goes on to hold until nearly all say something else."""
        self._sights.append(offset)
        common, times = Counter(self._sights).most_common(1)[0]
        if times >= (_ENOUGH if self.offset is None else _SIGHTS - 1):
            self.offset = common
