"""Numbers the steps of a job: a step has the same number on all ranks on this node. If a variable that holds
the step number is watched, the job's own numbers are used.

Also computes how long each rank waited for other ranks of its job on this node, from the durations of their operations.

If an operation ends on all ranks together, the rank that calls it last has the shortest duration; the wait of another
rank is its duration less the shortest (as in ``diagnosis.balance``). A rank on another node may have called even later,
so the computed wait is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.steps.collective_steps import Step
from probing.daemon.nccl_uprobes.steps.operation_history import comm_of, op_of, signs
from probing.daemon.nccl_uprobes.steps.period import Period, least_rotation

__all__ = ("SLOTS", "Calibration", "JobSteps")

SLOTS = 1 << 13
"""The number of operations that are remembered for each job (232 KiB)."""
_Array = npt.NDArray[Any]
# An operation: its key, its shortest duration, its end on the first process that reported it, the pid of this process,
# and whether another process has reported it, too.
_SLOT = np.dtype([("key", "u8"), ("least", "i8"), ("end", "i8"), ("pid", "i4"), ("shared", "?")])
# Operations with the same key that end further apart than this are different operations: a process group that is made
# again has the same name, and counts from 0 again.
_TOGETHER_NS = 10_000_000_000
# True for the kinds of operations that end on all ranks together. Operations with a root do not, nor do operations of
# two ranks.
_JOINT = np.zeros(256, bool)
_JOINT[[OPS.index(op) for op in OPS if op.startswith(("all_", "reduce_scatter", "barrier"))]] = True


class _Waits:
    """The operations of one job, by communicator and sequence number. Not thread-safe."""

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
        new = ~_same(slots[at], keys, own)
        slots["key"][at[new]] = keys[new]
        slots["end"][at[new]] = own["end"][new]
        slots["least"][at[new]] = np.iinfo(np.int64).max
        slots["pid"][at[new]] = pid
        slots["shared"][at[new]] = False
        # If two operations have the same slot, the later operation gets it.
        kept = _same(slots[at], keys, own)
        at = at[kept]
        np.minimum.at(slots["least"], at, (own["end"] - own["begin"])[kept])
        slots["shared"][at] |= slots["pid"][at] != pid

    def of(self, operations: _Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Returns the wait of each OPERATION of a process (ns, 0 if unknown), and a mask of the operations whose wait
        is known.
        """
        if not len(self._slots):
            return np.zeros(len(operations), np.int64), np.zeros(len(operations), bool)
        keys, at = _places(operations)
        slots = self._slots[at]
        known = _comparable(operations) & _same(slots, keys, operations) & slots["shared"]
        return np.where(known, operations["end"] - operations["begin"] - slots["least"], 0), known


def _same(slots: _Array, keys: npt.NDArray[np.uint64], operations: _Array) -> npt.NDArray[np.bool_]:
    """Returns, for each index, whether the slot holds the operation."""
    together = np.abs(operations["end"] - slots["end"]) <= _TOGETHER_NS
    same: npt.NDArray[np.bool_] = together & (slots["key"] == keys)
    return same


def _comparable(operations: _Array) -> npt.NDArray[np.bool_]:
    timed = (operations["begin"] >= 0) & (operations["end"] >= 0) & (operations["seq"] >= 0)
    comparable: npt.NDArray[np.bool_] = timed & _JOINT[op_of(operations["kind"])]
    return comparable


def _places(operations: _Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Returns the key and the slot of each operation: successive operations of a communicator have successive slots."""
    comm = comm_of(operations["kind"])
    return signs(comm, operations["seq"]), (comm + operations["seq"]) % SLOTS


_REMEMBERED = 4096
_MAX_PERIODS, _NAME_BYTES = 64, 16
_READINGS = 8
_ENOUGH = 3
_MAX_WAITING = 64


class JobSteps:
    """Keeps the numbers of the steps of one job, and the operation of a period at which all ranks begin a step.

    ``waits`` holds the operations of the ranks, and computes their waits.
    """

    def __init__(self) -> None:
        self.waits = _Waits()
        # Hash of a pattern -> the index in its least rotation at which steps begin. A pattern can have thousands of
        # operations, so its hash is the key.
        self._begins: OrderedDict[bytes, int] = OrderedDict()
        self._by_operation: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._by_time: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def turn(self, period: Period) -> Period:
        """Returns ``period`` rotated to begin as on the first rank that had this period."""
        abstract = period.abstract
        least = least_rotation(abstract)
        name = blake2b(np.array(abstract[least:] + abstract[:least]).tobytes(), digest_size=_NAME_BYTES).digest()
        begin = self._begins.setdefault(name, -least % len(abstract))
        self._begins.move_to_end(name)
        if len(self._begins) > _MAX_PERIODS:
            self._begins.popitem(last=False)
        return period.rotated((least + begin) % len(abstract))

    def number(self, step: Step, before: int | None) -> int:
        """Returns the number of a step, negative before step 0. ``before``: the number of the previous step of the
        process.

        Without a previous step, or if steps were missed, the step is matched with steps of other ranks: by its first
        operation, whose sequence number all ranks share, or by time.
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
    """Computes ``offset``: the value of a process's variable ``step`` minus our number of the step; None while
    unknown.
    """

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
        """Sets the offset that most readings show; a reading may be off by one, because the variable changes within a
        step.

        An offset is kept until nearly all recent readings show another offset.
        """
        self._offsets.append(offset)
        common, times = Counter(self._offsets).most_common(1)[0]
        if times >= (_ENOUGH if self.offset is None else _READINGS - 1):
            self.offset = common
