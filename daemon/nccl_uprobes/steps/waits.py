"""Finds how long each rank waited for other ranks of its job on this node, by the durations of their operations.

Of an operation that ends on all ranks together, the rank that calls last has the shortest duration; another rank waited
for it as long as its own duration is longer (as ``diagnosis.balance``). A rank of another node may have called later
still: what is found is the least that the rank waited.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.steps.operation_history import comm_of, op_of, signs

__all__ = ("SLOTS", "Waits")

SLOTS = 1 << 13
"""Operations that are remembered of a job, 196 KiB."""
_Array = npt.NDArray[Any]
# Which operation, its shortest duration, the process that reported it first, whether another one did, too.
_SLOT = np.dtype([("key", "u8"), ("least", "i8"), ("pid", "i4"), ("shared", "?")])
# Operations with a root and those of two ranks have no common end.
_JOINT = np.zeros(256, bool)
_JOINT[[OPS.index(op) for op in OPS if op.startswith(("all_", "reduce_scatter", "barrier"))]] = True


class Waits:
    """The operations of one job, by communicator and sequence number. One thread."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, _SLOT)

    def add(self, pid: int, operations: _Array) -> None:
        """Adds OPERATIONs of a process; those that are added again change nothing."""
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
        """Returns how long each of a process's OPERATIONs waited, ns, 0 where not known, and where it is known."""
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
    """The key of each operation and its slot: operations in a row on a communicator have slots in a row."""
    comm = comm_of(operations["kind"])
    return signs(comm, operations["seq"]), (comm + operations["seq"]) % SLOTS
