"""Makes rows of ``comm.ops`` and ``comm.inflight`` from decoded operations, a whole column at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.text import escape
from probing.daemon import columns
from probing.daemon.clock import ClockPair
from probing.daemon.columns import Array
from probing.daemon.nccl_uprobes.records import names
from probing.daemon.nccl_uprobes.records.operations import Operations

__all__ = ("finished_rows", "inflight_rows")


def finished_rows(node: str, records: Array, operations: Operations, pair: ClockPair) -> pa.RecordBatch:
    """Returns rows of comm.ops, in its physical schema. ``records``: records of the ring ``collectives``;
    ``operations``: the decoded records.
    """
    made = _shared(node, records, operations, pair) | _ending(records, pair)
    return columns.batch("comm.ops", made)


def inflight_rows(node: str, records: Array, operations: Operations, pair: ClockPair) -> pa.RecordBatch:
    """Returns rows of ``comm.inflight``. ``records``: values of the map ``operations``; ``operations``: the decoded
    records.
    """
    made = _shared(node, records, operations, pair)
    made["state"] = columns.named(records["state"].astype(np.int32) - 1, names.STATES)
    made["age_ns"] = columns.numbers(pair.mono_ns - operations.called)
    return columns.batch("comm.inflight", made)


def _shared(node: str, records: Array, operations: Operations, pair: ClockPair) -> dict[str, pa.Array[Any]]:
    entities, which = operations.entities, operations.entity_of
    processes = [entity.who for entity in entities]
    made = columns.identity_columns(node, processes, which, records["tgid"], records["start_ns"])
    return made | {
        "ts": columns.times(operations.called + pair.mono_to_utc_ns),
        "tid": columns.numbers(records["tid"].astype(np.int32)),
        "comm": columns.texts([entity.comm for entity in entities], which),
        "comm_name": columns.texts([entity.comm_name for entity in entities], which),
        "comm_rank": columns.integers([entity.comm_rank for entity in entities], which),
        "comm_size": columns.integers([entity.comm_size for entity in entities], which),
        "backend": columns.named(records["backend"].astype(np.int32) - 1, names.BACKENDS),
        "seq": columns.numbers(operations.seq, operations.seq < 0),
        "op": columns.named(operations.op, names.OPS),
        "dtype": columns.named(operations.dtype, names.DTYPES),
        "count": columns.numbers(operations.count, operations.count < 0),
        "bytes": columns.numbers(operations.size, operations.size < 0),
        "redop": columns.named(operations.redop, names.REDOPS),
        "root": columns.numbers(records["root"], records["root"] < 0),
        "peer": columns.numbers(records["peer"], records["peer"] < 0),
        "stream": columns.numbers(records["stream"], records["backend"] == names.GLOO),
        "group_id": columns.numbers(records["group_id"].astype(np.int64), records["group_id"] == 0),
        "async_op": columns.flags(records["async_op"], records["async_op"] > 1),
    }


def _ending(records: Array, pair: ClockPair) -> dict[str, pa.Array[Any]]:
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
        # Exact ends are stored as done_hi_ns, ends without an upper bound as done_lo_ns; a view computes the other
        # columns.
        "done_lo_ns": _after(np.where(exact | ~open_ended, 0, low), call),
        "done_hi_ns": _after(np.where(exact, high, 0), call),
        "done_hi": columns.times(high.astype(np.int64) + pair.mono_to_utc_ns, exact | open_ended),
        "done_within_ns": columns.numbers((high - low).astype(np.int64), exact | open_ended | (low == 0)),
    }


def _after(when: Array, call: Array) -> pa.Array[Any]:
    return columns.numbers((when - call).astype(np.int64), when == 0)


def _errors(records: Array) -> pa.Array[Any]:
    failed = np.flatnonzero(records["state"] == names.STATE_FAILED)
    if not len(failed):
        return pa.nulls(len(records), pa.string())
    texts: list[str | None] = [None] * len(records)
    for index in failed:
        text = _shown(bytes(records["error"][index]), records.dtype["error"].itemsize)
        texts[index] = text or _result(records[index])
    return pa.array(texts, pa.string())


def _shown(error: bytes, room: int) -> str:
    """Returns the text of an error. A text that fills ``room`` bytes was cut, so it is shortened to its last whole
    sentence, or ends in ``…``.
    """
    text = escape(error)
    if len(error) < room - 1:
        return text
    whole, end, _ = text.rpartition(". ")
    return f"{whole}." if end else f"{text}\u2026"


def _result(record: np.void) -> str | None:
    """Returns the name of the ncclResult_t with which an NCCL operation failed; None for gloo and for success."""
    number = int(record["result"])
    if int(record["backend"]) != names.NCCL or not number:
        return None
    return names.NCCL_RESULTS[number] if number < len(names.NCCL_RESULTS) else f"ncclResult {number}"
