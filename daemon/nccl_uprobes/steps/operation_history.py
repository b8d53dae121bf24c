"""The operations of each process as numbers that can be compared, in the order of their calls."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow import integers, texts_and_indices
from probing.daemon.nccl_uprobes.operations.names import DTYPES, OPS

__all__ = ("OPERATION", "WINDOW", "History", "Texts", "operations_by_process", "signs")

Array = npt.NDArray[Any]
# Times are UTC ns; -1 where not known. `kind` is (comm, op, dtype), `sign` the same with the count.
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
"""Operations of a process that are remembered, 2 MiB."""
_MAX_NAMES = 1 << 12
_COMM_BYTES = 5
_OP_BITS = 8
_KIND_FACTOR, _COUNT_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Texts:
    """Numbers for the names of communicators, the same everywhere and always; and back to what they are called."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def number(self, comm: str, name: str | None) -> int:
        number = int.from_bytes(blake2b(comm.encode("utf-8", "replace"), digest_size=_COMM_BYTES).digest(), "little")
        if name:
            self._names[number] = name
            self._names.move_to_end(number)
            if len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)
        return number

    def words(self, kind: int) -> tuple[str, str, str]:
        """(op, dtype, what the communicator is called) of a kind; empty where not known."""
        op, dtype, number = kind & 0xFF, kind >> _OP_BITS & 0xFF, kind >> 2 * _OP_BITS
        return (
            OPS[op] if op < len(OPS) else "",
            DTYPES[dtype] if dtype < len(DTYPES) else "",
            self._names.get(number, ""),
        )


def operations_by_process(batch: pa.RecordBatch, texts: Texts) -> dict[tuple[int, int], Array]:
    """A physical batch of ``comm.ops`` -> the OPERATIONs of each (pid, start_ns), in the order of their calls."""
    if not batch.num_rows:
        return {}
    found = np.empty(batch.num_rows, OPERATION)
    found["t"] = integers(batch.column("ts"))
    kind = _codes(batch, "op", OPS) | _codes(batch, "dtype", DTYPES) << _OP_BITS | _comms(batch, texts) << 2 * _OP_BITS
    found["kind"] = kind
    found["count"] = integers(batch.column("count"))
    found["sign"] = signs(kind, found["count"])
    found["bytes"] = integers(batch.column("bytes"))
    found["seq"] = integers(batch.column("seq"))
    began, ended = integers(batch.column("start_ns_after")), integers(batch.column("done_hi_ns"))
    found["begin"] = np.where(began < 0, -1, found["t"] + began)
    # Of an end that is not exact the time itself is stored.
    found["end"] = np.where(ended < 0, integers(batch.column("done_hi")), found["t"] + ended)
    pids, starts = integers(batch.column("pid")), integers(batch.column("start_ns"))
    return {
        (int(pid), int(start)): _ordered(found[(pids == pid) & (starts == start)])
        for pid in np.unique(pids)
        for start in np.unique(starts[pids == pid])
    }


def signs(kind: Array, count: Array) -> npt.NDArray[np.uint64]:
    """Equal for equal (comm, op, dtype, count)."""
    found: npt.NDArray[np.uint64] = kind.astype(np.uint64) * _KIND_FACTOR + count.astype(np.uint64) * _COUNT_FACTOR
    return found


class History:
    """The last operations of one process. ``at`` is the index of the first that was not taken yet."""

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
        """Those that were not taken yet."""
        return self.operations[self.at :]

    def add(self, new: Array) -> int:
        """Insert by time of call; those before the first that waits, and those that are there, are left out.

        Returns how many came in.
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
        # A drain that could not be written comes again. Both are in order: only where they overlap can one be the same.
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
        size = min(max(2 * (len(kept) + more), 256), 2 * WINDOW)
        buffer = np.empty(size, OPERATION)
        buffer[: len(kept)] = kept
        self._buffer, self._begin, self._end = buffer, 0, len(kept)


def _ordered(operations: Array) -> Array:
    t = operations["t"]
    return operations if bool((t[1:] >= t[:-1]).all()) else operations[np.argsort(t, kind="stable")]


def _codes(batch: pa.RecordBatch, column: str, known: tuple[str, ...]) -> npt.NDArray[np.int64]:
    texts, indices = texts_and_indices(batch.column(column))
    codes = np.array([known.index(text) if text in known else 0xFF for text in texts], np.int64)
    return codes[indices]


def _comms(batch: pa.RecordBatch, texts: Texts) -> npt.NDArray[np.int64]:
    comms, comm_of = texts_and_indices(batch.column("comm"))
    names, name_of = texts_and_indices(batch.column("comm_name"))
    pairs, inverse = np.unique(comm_of * len(names) + name_of, return_inverse=True)
    numbers = [
        0 if (comm := comms[int(pair) // len(names)]) is None else texts.number(comm, names[int(pair) % len(names)])
        for pair in pairs
    ]
    found: npt.NDArray[np.int64] = np.array(numbers, np.int64)[inverse]
    return found
