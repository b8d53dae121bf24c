"""Makes rows of a user's table from the events of the probe."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Table
from probing.daemon import columns
from probing.daemon.clock import ClockPair
from probing.daemon.processes.procfs import clean_text
from probing.daemon.source import Processes
from probing.daemon.user_probes.spec import Spec

__all__ = ("rows_of",)


def rows_of(
    spec: Spec, table: Table, records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes
) -> pa.RecordBatch:
    """Returns events (``c_text.record_dtype``) as a batch of ``table``, which may have more columns than the probe.

    The identity of each process is looked up once; an unknown process has no job, run and rank.
    """
    pids, starts = records["probing_tgid"], records["probing_start_ns"]
    who, which = columns.identities(processes, pids, starts)
    made = columns.identity_columns(node, who, which, pids, starts)
    made["ts"] = columns.times(records["probing_time_ns"].astype(np.int64) + pair.mono_to_utc_ns)
    made["tid"] = columns.numbers(records["probing_tid"].astype(np.int32))
    for column in spec.fields:
        values = records[column.name]
        made[column.name] = _clean_texts(values) if column.type == "text" else columns.numbers(values)
    made |= {field.name: pa.nulls(len(records), field.type) for field in table.physical if field.name not in made}
    return columns.batch(table.physical, made)


def _clean_texts(values: npt.NDArray[Any]) -> pa.Array[Any]:
    distinct, which = np.unique(values, return_inverse=True)
    return columns.texts([clean_text(bytes(text).split(b"\0", 1)[0]) or None for text in distinct], which)
