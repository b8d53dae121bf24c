"""Keeps the operations of each process in the order of their calls, as records of a fixed size that compare fast."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.nccl_uprobes.records.names import DTYPES, OPS
from probing.daemon.nccl_uprobes.records.operations import Operations

__all__ = ("OPERATION", "WINDOW", "History", "Texts", "comm_of", "op_of", "operations_by_process", "signs")

Array = npt.NDArray[Any]
# Times are CLOCK_MONOTONIC ns; -1: unknown. `kind`: (comm, op, dtype); `sign`: a hash of kind and count.
OPERATION = np.dtype(
    [
        ("sign", "u8"),
        ("kind", "i8"),
        ("t", "i8"),
        ("begin", "i8"),
        ("end", "i8"),
        ("seq", "i8"),
        ("count", "i8"),
        ("bytes", "i8"),
    ]
)
WINDOW = 1 << 15
"""The number of operations that are kept for each process (2 MiB)."""
# A new buffer has space for this many operations behind a full window. When the space is used up, the window is copied
# to another buffer.
_SPARE = WINDOW // 4
_MAX_NAMES = 1 << 14
_COMM_BYTES = 5
_OP_BITS, _UNKNOWN = 8, 0xFF
_KIND_FACTOR, _COUNT_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Texts:
    """Numbers communicators by a hash of their text, which is equal on all ranks. Remembers their names for each
    process, since communicators of two jobs can have the same text and different names.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[tuple[int, int], int], str] = OrderedDict()

    def number(self, process: tuple[int, int], comm: str, name: str | None) -> int:
        number = int.from_bytes(blake2b(comm.encode("utf-8", "replace"), digest_size=_COMM_BYTES).digest(), "little")
        if name:
            self._names[process, number] = name
            self._names.move_to_end((process, number))
            if len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)
        return number

    def names(self, process: tuple[int, int], kind: int) -> tuple[str, str, str]:
        """Returns (op, dtype, name of the communicator) of a kind; empty texts if unknown."""
        op, dtype, number = kind & 0xFF, kind >> _OP_BITS & 0xFF, kind >> 2 * _OP_BITS
        return (
            OPS[op] if op < len(OPS) else "",
            DTYPES[dtype] if dtype < len(DTYPES) else "",
            self._names.get((process, number), ""),
        )


def operations_by_process(operations: Operations, texts: Texts) -> dict[tuple[int, int], Array]:
    """Returns the OPERATIONs of each (pid, start_ns), in the order of their calls."""
    if not len(operations):
        return {}
    entities, entity_of = operations.entities, operations.entity_of
    comms = np.array(
        [0 if e.comm is None else texts.number(e.process, e.comm, e.comm_name) for e in entities], np.int64
    )
    compact = np.empty(len(operations), OPERATION)
    compact["kind"] = _code(operations.op) | _code(operations.dtype) << _OP_BITS | comms[entity_of] << 2 * _OP_BITS
    compact["sign"] = signs(compact["kind"], operations.count)
    compact["t"], compact["begin"], compact["end"] = operations.called, operations.started, operations.finished
    compact["seq"], compact["count"], compact["bytes"] = operations.seq, operations.count, operations.size
    processes = [entity.process for entity in entities]
    place = {process: index for index, process in enumerate(dict.fromkeys(processes))}
    process_of = np.array([place[process] for process in processes])[entity_of]
    return {process: _ordered(compact[process_of == index]) for process, index in place.items()}


def op_of(kind: Array) -> Array:
    """Returns the index in OPS of each kind, 255 if unknown."""
    return kind & 0xFF


def comm_of(kind: Array) -> Array:
    """Returns the number of the communicator of each kind."""
    return kind >> 2 * _OP_BITS


def signs(kind: Array, count: Array) -> npt.NDArray[np.uint64]:
    """Returns a hash of (comm, op, dtype, count) of each operation."""
    hashes: npt.NDArray[np.uint64] = kind.astype(np.uint64) * _KIND_FACTOR + count.astype(np.uint64) * _COUNT_FACTOR
    return hashes


class History:
    """The last operations of one process. ``at``: index of the first operation that is not in a finished step;
    ``added`` counts all operations ever added."""

    def __init__(self) -> None:
        self._buffer = np.empty(256, OPERATION)
        self._begin = 0
        self._end = 0
        self.at = 0
        self.added = 0

    @property
    def operations(self) -> Array:
        return self._buffer[self._begin : self._end]

    @property
    def waiting(self) -> Array:
        """The operations from ``at`` on."""
        return self.operations[self.at :]

    def add(self, new: Array) -> int:
        """Inserts ``new`` by time of call, except duplicates and operations that are older than ``waiting``.

        Returns the number of inserted operations.
        """
        known = self.operations
        if len(known) and len(new) and new["t"][0] <= known["t"][-1]:
            new = self._missing(new)
        new = new[-WINDOW:]
        self._reserve(len(new))
        self._buffer[self._end : self._end + len(new)] = new
        self._end += len(new)
        self.added += len(new)
        waiting = self.waiting
        if 0 < len(new) < len(waiting):
            mixed = waiting[np.searchsorted(waiting["t"][: -len(new)], new["t"][0], side="right") :]
            if len(mixed) > len(new):
                mixed[:] = _ordered(mixed)
        return len(new)

    def _missing(self, new: Array) -> Array:
        if self.at:
            first = self.operations["t"][self.at] if len(self.waiting) else self.operations["t"][-1] + 1
            new = new[new["t"] >= first]
        # A drain that could not be written is repeated. Both arrays are sorted, so duplicates are where the times
        # overlap.
        waiting = self.waiting
        if not len(new) or not len(waiting):
            return new
        same = waiting[np.searchsorted(waiting["t"], new["t"][0]) :]
        part = new[: np.searchsorted(new["t"], waiting["t"][-1], side="right")]
        kept = ~(np.isin(part["t"], same["t"]) & np.isin(part["sign"], same["sign"]))
        return np.concatenate((part[kept], new[len(part) :]))

    def _reserve(self, more: int) -> None:
        if self._end + more <= len(self._buffer):
            return
        kept = self.operations[-max(WINDOW - more, 0) :] if more < WINDOW else self.operations[:0]
        self.at = max(self.at - (self._end - self._begin - len(kept)), 0)
        size = min(max(2 * (len(kept) + more), 256), WINDOW + _SPARE)
        buffer = np.empty(size, OPERATION)
        buffer[: len(kept)] = kept
        self._buffer, self._begin, self._end = buffer, 0, len(kept)


def _ordered(operations: Array) -> Array:
    t = operations["t"]
    return operations if bool((t[1:] >= t[:-1]).all()) else operations[np.argsort(t, kind="stable")]


def _code(index: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return np.where(index < 0, _UNKNOWN, index).astype(np.int64)
