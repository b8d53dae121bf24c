"""Decodes ``struct collective_record`` (collectives.bpf.h) into numpy columns, from which rows, roles and steps are
made.

The numbers of gloo and NCCL are mapped to one numbering (``records.names``). Counts are converted to the number of
elements that the rank contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probing.daemon.columns import Array
from probing.daemon.nccl_uprobes.records import names
from probing.daemon.nccl_uprobes.records.entities import Entities, Entity
from probing.daemon.source import Processes

__all__ = ("OperationDecoder", "Operations")

# No tensor has more elements than this: a larger count was read from memory that is not a tensor.
_MAX_COUNT = 1 << 48
_BLOCKS = [names.OPS.index(op) for op in ("reduce_scatter", "all_to_all", "scatter")]
_SCATTER = names.OPS.index("scatter")


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations as columns with an element for each operation; -1 for an unknown value, times in CLOCK_MONOTONIC ns.

    ``entities``: the distinct pairs of process and communicator. ``entity_of``: for each operation, the index of its
    entity. ``op``, ``dtype`` and ``redop`` are indices into the tuples of ``records.names``. ``count`` (elements) and
    ``size`` (bytes) measure the rank's contribution. ``finished`` is the latest time at which the operation can have
    ended.
    """

    entities: Sequence[Entity]
    entity_of: npt.NDArray[np.intp]
    op: npt.NDArray[np.int32]
    dtype: npt.NDArray[np.int32]
    redop: npt.NDArray[np.int32]
    count: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    seq: npt.NDArray[np.int64]
    called: npt.NDArray[np.int64]
    started: npt.NDArray[np.int64]
    finished: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.called)


class OperationDecoder:
    """Decodes records, and remembers the entities of earlier records. Not thread-safe."""

    def __init__(self, processes: Processes) -> None:
        self._entities = Entities(processes)
        self._codes = {field: names.codes(field) for field in ("op", "dtype", "redop")}

    def decode(self, records: Array) -> Operations:
        """Returns ``records``, from the ring ``collectives`` or the map ``operations``, as Operations in the same
        order.
        """
        entities, entity_of = self._entities.of(records)
        op, dtype, redop = (self._decoded(records, field) for field in ("op", "dtype", "redop"))
        count, size = _contribution(records, op, dtype)
        seq = records["seq"].astype(np.int64)
        called, started, finished = (records[field].astype(np.int64) for field in ("t_call", "t_start", "t_done_hi"))
        return Operations(
            entities,
            entity_of,
            op,
            dtype,
            redop,
            count,
            size,
            seq=np.where(seq < 0, -1, seq),
            called=called,
            started=_unless(started, (started == 0) | (started < called)),
            finished=_unless(finished, (finished == 0) | (finished < called)),
        )

    def _decoded(self, records: Array, field: str) -> npt.NDArray[np.int32]:
        backend = np.minimum(records["backend"], names.NCCL).astype(np.intp)
        codes: npt.NDArray[np.int32] = self._codes[field][backend * 256 + records[field]]
        return codes


def _unless(times: npt.NDArray[np.int64], unknown: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(unknown, -1, times)


def _contribution(
    records: Array, op: npt.NDArray[np.int32], dtype: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the elements and the bytes that the rank contributes; -1 if unknown.

    NCCL gives the number of elements of one block. In reduce_scatter and all_to_all, and in scatter on the root, a rank
    contributes a block for each rank. In scatter, ranks other than the root contribute nothing.
    """
    raw = records["count"]
    known = raw < _MAX_COUNT
    count = np.where(known, raw, 0).astype(np.int64)
    nccl = records["backend"] == names.NCCL
    if nccl.any():
        ranks = records["comm_size"].astype(np.int64)
        blocks = nccl & np.isin(op, _BLOCKS)
        known &= ~blocks | (ranks > 0)
        scattered = nccl & (op == _SCATTER)
        contributes = ~scattered | (records["root"] == records["comm_rank"])
        count = np.where(contributes, np.where(blocks, count * np.maximum(ranks, 1), count), 0)
    width = names.DTYPE_BYTES[np.maximum(dtype, 0)]
    size_known = known & ((dtype >= 0) | (count == 0))
    return np.where(known, count, -1), np.where(size_known, count * width, -1)
