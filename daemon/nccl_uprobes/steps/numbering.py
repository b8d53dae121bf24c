"""Numbers the steps of a job: alike on all its ranks on this node, and by the job's own variable if it is watched.

Finds how long each rank waited for other ranks of its job on this node, by the durations of their operations.

Of an operation that ends on all ranks together, the rank that calls last has the shortest duration; another rank waited
for it as long as its own duration is longer (as ``diagnosis.balance``). A rank of another node may have called later
still: the wait that is found is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.steps.collective_steps import Step
from probing.daemon.nccl_uprobes.steps.operation_history import comm_of, op_of, signs
from probing.daemon.nccl_uprobes.steps.period import Period, least_rotation

__all__ = ("SLOTS", "Calibration", "JobSteps")

SLOTS = 1 << 13
"""Operations that are remembered of a job, 196 KiB."""
_Array = npt.NDArray[Any]
# The key of an operation, its shortest duration, the process that reported it first, whether another process did, too.
_SLOT = np.dtype([("key", "u8"), ("least", "i8"), ("pid", "i4"), ("shared", "?")])
# Kinds of operations with a common end: operations with a root and operations of two ranks have none.
_JOINT = np.zeros(256, bool)
_JOINT[[OPS.index(op) for op in OPS if op.startswith(("all_", "reduce_scatter", "barrier"))]] = True


class _Waits:
    """The operations of one job, by communicator and sequence number. One thread."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, _SLOT)

    def add(self, pid: int, operations: _Array) -> None:
        """Adds OPERATIONs of a process; operations that are added again change nothing."""
        own = operations[_comparable(operations)]
        if not len(own):
            return
        if not len(self._slots):
            self._slots = np.zeros(SLOTS, _SLOT)
        slots, (keys, at) = self._slots, _places(own)
        new = slots["key"][at] != keys
        slots["key"][at[new]] = keys[new]
        slots["least"][at[new]] = np.iinfo(np.int64).max
        slots["pid"][at[new]] = pid
        slots["shared"][at[new]] = False
        # Of two operations with the same place the later one has it.
        kept = slots["key"][at] == keys
        at = at[kept]
        np.minimum.at(slots["least"], at, (own["end"] - own["begin"])[kept])
        slots["shared"][at] |= slots["pid"][at] != pid

    def of(self, operations: _Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Returns the wait of each of a process's OPERATIONs, ns, 0 if not known, and a mask of the known waits."""
        if not len(self._slots):
            return np.zeros(len(operations), np.int64), np.zeros(len(operations), bool)
        keys, at = _places(operations)
        slots = self._slots[at]
        known = _comparable(operations) & (slots["key"] == keys) & slots["shared"]
        return np.where(known, operations["end"] - operations["begin"] - slots["least"], 0), known


def _comparable(operations: _Array) -> npt.NDArray[np.bool_]:
    timed = (operations["begin"] >= 0) & (operations["end"] >= 0) & (operations["seq"] >= 0)
    found: npt.NDArray[np.bool_] = timed & _JOINT[op_of(operations["kind"])]
    return found


def _places(operations: _Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Returns the key and the slot of each operation: operations in a row on a communicator have slots in a row."""
    comm = comm_of(operations["kind"])
    return signs(comm, operations["seq"]), (comm + operations["seq"]) % SLOTS


_REMEMBERED = 4096
_MAX_PERIODS = 64
_READINGS = 8
_ENOUGH = 3
_MAX_WAITING = 64


class JobSteps:
    """Agrees between the ranks of one job on the place in the period at which a step begins, and on its number.

    ``waits``: the operations of the ranks.
    """

    def __init__(self) -> None:
        self.waits = _Waits()
        self._begins: OrderedDict[tuple[tuple[int, int], ...], int] = OrderedDict()
        self._by_operation: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._by_time: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def turn(self, period: Period) -> Period:
        """Returns ``period`` rotated so that it begins where it began on the first rank that had it."""
        abstract = period.abstract
        least = least_rotation(abstract)
        name = tuple(abstract[least:] + abstract[:least])
        if len(self._begins) >= _MAX_PERIODS:
            self._begins.popitem(last=False)
        begin = self._begins.setdefault(name, -least % len(abstract))
        return period.rotated((least + begin) % len(abstract))

    def number(self, step: Step, before: int | None) -> int:
        """Returns the number of a step, negative before step 0; ``before``: its predecessor's in the same process.

        Without a predecessor, or after missed steps, ranks are matched by the first operation of the step, whose
        sequence number is the same on all of them, else by time.
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
    """Finds ``offset``: the value of a process's variable ``step`` minus our number of the step; None: not known."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque(maxlen=_MAX_WAITING)
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=_MAX_WAITING)
        self._offsets: deque[int] = deque(maxlen=_READINGS)
        self.offset: int | None = None

    def reading(self, t: int, value: int) -> None:
        """Adds a reading: the variable was first read as ``value`` at ``t``, CLOCK_MONOTONIC ns."""
        for t_start, t_end, number in self._ended:
            if t_start <= t < t_end:
                self._conclude(value - number)
                return
        self._waiting.append((t, value))

    def ended(self, t_start: int, t_end: int, number: int) -> None:
        """Compares ``number``, of a step that has ended, with the values read during the step."""
        self._ended.append((t_start, t_end, number))
        while self._waiting and self._waiting[0][0] < t_end:
            t, value = self._waiting.popleft()
            if t >= t_start:
                self._conclude(value - number)

    def _conclude(self, offset: int) -> None:
        """Takes the offset of most readings; one reading may be off by one, as the variable changes within a step.

        An offset holds until nearly all recent readings agree on another.
        """
        self._offsets.append(offset)
        common, times = Counter(self._offsets).most_common(1)[0]
        if times >= (_ENOUGH if self.offset is None else _READINGS - 1):
            self.offset = common
