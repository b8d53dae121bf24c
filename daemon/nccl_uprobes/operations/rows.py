"""Finished records into rows: whole columns at a time, with Python only once a distinct process and communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon import columns
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.columns import Array
from probing.daemon.nccl_uprobes.operations import names
from probing.daemon.nccl_uprobes.operations.entities import Entities, Entity
from probing.daemon.source import Processes

__all__ = ("Rows",)

# More elements than any tensor can have: what says so was read from memory that is no tensor.
_MAX_COUNT = 1 << 48
_MAX_SEEN = 65536


class Rows:
    """Rows of ``comm.ops``, ``comm.communicators`` and ``comm.inflight`` for one node. One thread."""

    def __init__(self, node: str, processes: Processes) -> None:
        self._node = node
        self._entities = Entities(processes)
        self._tables = {field: names.codes(field) for field in ("op", "dtype", "redop")}
        self._seen: set[tuple[int, int, str]] = set()
        self.backends: dict[tuple[int, int], frozenset[str]] = {}

    def forget(self, pid: int, start_ns: int) -> None:
        """The process has ended."""
        self.backends.pop((pid, start_ns), None)

    def finished(self, records: Array, pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """``records`` of the ring ``collectives`` -> batches of ``comm.ops`` and ``comm.communicators``."""
        if not len(records):
            return {}
        entities, first, inverse = self._entities.of(records)
        made = self._shared(records, pair, entities, inverse) | self._ending(records, pair)
        self._note_backends(records, entities, first)
        batches = {"comm.ops": columns.batch("comm.ops", made)}
        if rows := self._new_communicators(records, pair, entities, first):
            batches["comm.communicators"] = batch_of("comm.communicators", rows)
        return batches

    def inflight(self, records: Array, pair: ClockPair) -> pa.RecordBatch:
        """Values of the map ``operations`` -> ``comm.inflight`` in its logical schema."""
        entities, _, inverse = self._entities.of(records)
        made = self._shared(records, pair, entities, inverse)
        made["state"] = columns.named(records["state"].astype(np.int32) - 1, names.STATES)
        made["age_ns"] = columns.numbers(pair.mono_ns - records["t_call"].astype(np.int64))
        return columns.batch("comm.inflight", made)

    def _shared(
        self, records: Array, pair: ClockPair, entities: Sequence[Entity], inverse: npt.NDArray[np.intp]
    ) -> dict[str, pa.Array[Any]]:
        numbers = {field: self._numbers_of(records, field) for field in ("op", "dtype", "redop")}
        count, size = _contribution(records, numbers["op"], numbers["dtype"])
        who = [entity.who for entity in entities]
        made = columns.identity_columns(self._node, who, inverse, records["tgid"], records["start_ns"])
        return made | {
            "ts": columns.times(records["t_call"].astype(np.int64) + pair.mono_to_utc_ns),
            "tid": columns.numbers(records["tid"].astype(np.int32)),
            "comm": columns.texts([entity.comm for entity in entities], inverse),
            "comm_name": columns.texts([entity.comm_name for entity in entities], inverse),
            "comm_rank": columns.integers([entity.comm_rank for entity in entities], inverse),
            "comm_size": columns.integers([entity.comm_size for entity in entities], inverse),
            "backend": columns.named(records["backend"].astype(np.int32) - 1, names.BACKENDS),
            "seq": columns.numbers(records["seq"].astype(np.int64), records["seq"] >> 63 != 0),
            "op": columns.named(numbers["op"], names.OPS),
            "dtype": columns.named(numbers["dtype"], names.DTYPES),
            "count": columns.numbers(count, count < 0),
            "bytes": columns.numbers(size, size < 0),
            "redop": columns.named(numbers["redop"], names.REDOPS),
            "root": columns.numbers(records["root"], records["root"] < 0),
            "peer": columns.numbers(records["peer"], records["peer"] < 0),
            "stream": columns.numbers(records["stream"], records["backend"] == names.GLOO),
            "group_id": columns.numbers(records["group_id"].astype(np.int64), records["group_id"] == 0),
            "async_op": columns.flags(records["async_op"], records["async_op"] > 1),
        }

    def _numbers_of(self, records: Array, field: str) -> npt.NDArray[np.int32]:
        backend = np.minimum(records["backend"], names.NCCL).astype(np.intp)
        numbers: npt.NDArray[np.int32] = self._tables[field][backend * 256 + records[field]]
        return numbers

    def _ending(self, records: Array, pair: ClockPair) -> dict[str, pa.Array[Any]]:
        state = records["state"]
        gone = state == names.STATE_ABANDONED
        ended = np.where(state > names.STATE_ABANDONED, 0, state.astype(np.int32)) - 1
        timing = np.where(gone, -1, records["timing"].astype(np.int32) - 1)
        call, low, high = records["t_call"], records["t_done_lo"], records["t_done_hi"]
        exact, open_ended = timing == names.TIMINGS.index("exact"), high == 0
        return {
            "timing_source": columns.named(timing, names.TIMINGS),
            "state": columns.named(ended, names.STATES),
            "error": _errors(records),
            "step": pa.nulls(len(records), pa.int64()),
            "launch_ns_after": _after(records["t_launch"], call),
            "start_ns_after": _after(records["t_start"], call),
            # The view puts the bounds together again; both of an exact time are one.
            "done_lo_ns": _after(np.where(exact | ~open_ended, 0, low), call),
            "done_hi_ns": _after(np.where(exact, high, 0), call),
            "done_hi": columns.times(high.astype(np.int64) + pair.mono_to_utc_ns, exact | open_ended),
            "done_within_ns": columns.numbers((high - low).astype(np.int64), exact | open_ended | (low == 0)),
        }

    def _note_backends(self, records: Array, entities: Sequence[Entity], first: npt.NDArray[np.intp]) -> None:
        if len(self.backends) > _MAX_SEEN:
            self.backends.clear()
        for entity, index in zip(entities, first, strict=True):
            key = int(records["tgid"][index]), int(records["start_ns"][index])
            if name := _backend(entity):
                self.backends[key] = self.backends.get(key, frozenset()) | {name}

    def _new_communicators(
        self, records: Array, pair: ClockPair, entities: Sequence[Entity], first: npt.NDArray[np.intp]
    ) -> list[dict[str, Any]]:
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
        rows = []
        for entity, index in zip(entities, first, strict=True):
            # Of NCCL's the ring of communicators tells more.
            if entity.comm is None or entity.backend == names.NCCL:
                continue
            key = (int(records["tgid"][index]), int(records["start_ns"][index]), entity.comm)
            if key in self._seen:
                continue
            self._seen.add(key)
            when = int(records["t_call"][index]) + pair.mono_to_utc_ns
            rows.append(_communicator(self._node, key, entity, when))
        return rows


def _backend(entity: Entity) -> str | None:
    return names.BACKENDS[entity.backend - 1] if 0 < entity.backend <= len(names.BACKENDS) else None


def _communicator(node: str, key: tuple[int, int, str], entity: Entity, when: int) -> dict[str, Any]:
    who = entity.who
    spans = who is not None and who.world_size is not None and who.world_size == entity.comm_size
    return {
        "node": node,
        "ts": when,
        "job": who and who.job,
        "run": who and who.run,
        "pid": key[0],
        "start_ns": key[1],
        "comm": key[2],
        "name": entity.comm_name,
        "backend": _backend(entity),
        "size": entity.comm_size,
        "rank": entity.comm_rank,
        "job_rank": who.rank if who else None,
        "cuda_device": entity.cuda_device,
        "created": when,
        "parallel_role": "world" if spans else "unknown",
        "parallel_role_why": f"has all {entity.comm_size} ranks of the job" if spans else None,
    }


def _contribution(
    records: Array, op: npt.NDArray[np.int32], dtype: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(elements, bytes) that each rank contributes; -1 where not known.

    NCCL passes the elements of one block; with some operations a rank contributes one for each rank.
    """
    raw = records["count"]
    known = raw < _MAX_COUNT
    count = np.where(known, raw, 0).astype(np.int64)
    nccl = records["backend"] == names.NCCL
    if nccl.any():
        size = records["comm_size"].astype(np.int64)
        blocks = nccl & np.isin(op, _BLOCKS)
        known &= ~blocks | (size > 0)
        scattered = nccl & (op == _SCATTER)
        contributes = ~scattered | (records["root"] == records["comm_rank"])
        count = np.where(contributes, np.where(blocks, count * np.maximum(size, 1), count), 0)
    width = names.DTYPE_BYTES[np.maximum(dtype, 0)]
    size_known = known & ((dtype >= 0) | (count == 0))
    return np.where(known, count, -1), np.where(size_known, count * width, -1)


_BLOCKS = [names.OPS.index(op) for op in ("reduce_scatter", "all_to_all", "scatter")]
_SCATTER = names.OPS.index("scatter")


def _after(when: Array, call: Array) -> pa.Array[Any]:
    return columns.numbers((when - call).astype(np.int64), when == 0)


def _errors(records: Array) -> pa.Array[Any]:
    failed = np.flatnonzero(records["state"] == names.STATE_FAILED)
    if not len(failed):
        return pa.nulls(len(records), pa.string())
    texts: list[str | None] = [None] * len(records)
    for index in failed:
        said = _shown(bytes(records["error"][index]), records.dtype["error"].itemsize)
        texts[index] = said or _result(records[index])
    return pa.array(texts, pa.string())


def _shown(error: bytes, room: int) -> str:
    """What fitted into ``room`` bytes with a NUL at the end: whole sentences where there is one, else marked as cut."""
    text = "".join(c if c.isprintable() else "?" for c in error.decode(errors="replace"))
    if len(error) < room - 1:
        return text
    whole, end, _ = text.rpartition(". ")
    return f"{whole}." if end else f"{text}\u2026"


def _result(record: np.void) -> str | None:
    """The name of the ncclResult_t that an operation of NCCL gave."""
    number = int(record["result"])
    if int(record["backend"]) != names.NCCL or not number:
        return None
    return names.NCCL_RESULTS[number] if number < len(names.NCCL_RESULTS) else f"ncclResult {number}"
