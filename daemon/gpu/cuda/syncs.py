"""Makes rows of ``cuda.syncs`` from records of the ring ``cuda_syncs``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon import columns
from probing.daemon.clock import ClockPair
from probing.daemon.gpu.cuda.symbols import SYNC_OPS
from probing.daemon.source import Processes

__all__ = ("sync_rows",)

_EVENT = 2


def sync_rows(records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes) -> pa.RecordBatch:
    """Returns a physical batch of ``cuda.syncs``; ``records`` are ``struct cuda_sync_record`` (cuda.bpf.c)."""
    pids, starts, kinds = records["tgid"], records["start_ns"], records["kind"]
    who, which = columns.identities(processes, pids, starts)
    operations, operation_of = np.unique(kinds, return_inverse=True)
    results, result_of = np.unique(records["result"], return_inverse=True)
    made = columns.identity_columns(node, who, which, pids, starts)
    made |= {
        "ts": columns.times(records["t"].astype(np.int64) + pair.mono_to_utc_ns),
        "tid": columns.numbers(records["tid"].astype(np.int32)),
        "op": columns.texts([SYNC_OPS.get(int(kind)) for kind in operations], operation_of),
        "stream": columns.numbers(records["stream"], records["stream_known"] == 0),
        "event": columns.numbers(records["event"], kinds != _EVENT),
        "duration_ns": columns.numbers(records["duration_ns"].astype(np.int64)),
        "error": columns.texts([f"cudaError {int(code)}" if code else None for code in results], result_of),
    }
    return columns.batch("cuda.syncs", made)
