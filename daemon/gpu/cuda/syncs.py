"""Rows of ``cuda.syncs`` from records of the ring of that name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.clock import ClockPair
from probing.daemon.gpu.cuda.columns import batch, identities, identity_columns, numbers, texts
from probing.daemon.gpu.cuda.symbols import SYNC_OPS
from probing.daemon.source import Processes

__all__ = ("sync_rows",)

_EVENT = 2


def sync_rows(records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes) -> pa.RecordBatch:
    """``records`` as ``struct cuda_sync_record`` (cuda.bpf.c)."""
    who, inverse = identities(processes, records["tgid"], records["start_ns"])
    results = records["result"]
    errors = {int(code): f"cudaError {int(code)}" for code in np.unique(results) if code}
    columns = identity_columns(node, who, inverse, records["tgid"], records["start_ns"])
    columns |= {
        "ts": numbers(records["t"].astype(np.int64) + pair.mono_to_utc_ns).cast(pa.timestamp("ns")),
        "tid": numbers(records["tid"].astype(np.int32)),
        "op": texts(records["kind"], SYNC_OPS),
        "stream": numbers(records["stream"], records["stream_known"] == 0),
        "event": numbers(records["event"], records["kind"] != _EVENT),
        "duration_ns": numbers(records["duration_ns"].astype(np.int64)),
        "error": texts(results, errors),
    }
    return batch("cuda.syncs", columns)
