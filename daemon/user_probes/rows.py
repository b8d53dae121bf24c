"""Events of a user's probe as rows of its table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Table
from probing.daemon.clock import ClockPair
from probing.daemon.processes.procfs import clean_text
from probing.daemon.source import Processes
from probing.daemon.user_probes.spec import Spec

__all__ = ("rows_of",)


def rows_of(
    spec: Spec, table: Table, records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes
) -> pa.RecordBatch:
    """Events (``source.record_dtype``) as a physical batch of ``table``, which may have more columns than the probe.

    Who is who is asked once a process; a process that nobody knows has no job, run and rank.
    """
    count = len(records)
    keys, which = np.unique(records[["probing_tgid", "probing_start_ns"]], return_inverse=True)
    found = [processes.identity(int(key["probing_tgid"]), int(key["probing_start_ns"])) for key in keys]
    ts = records["probing_time_ns"].astype(np.int64) + pair.mono_to_utc_ns
    columns: dict[str, pa.Array[Any]] = {
        "node": _named([node], np.zeros(count, np.int32)),
        "ts": pa.array(ts, pa.timestamp("ns")),
        "job": _named([who.job if who else None for who in found], which),
        "run": _named([who.run if who else None for who in found], which),
        "pid": pa.array(records["probing_tgid"].astype(np.int32)),
        "start_ns": pa.array(records["probing_start_ns"].astype(np.int64)),
        "tid": pa.array(records["probing_tid"].astype(np.int32)),
        "rank": pa.array([who.rank if who else None for who in found], pa.int32()).take(_indices(which)),
    }
    for column in spec.fields:
        values = np.ascontiguousarray(records[column.name])
        columns[column.name] = _texts(values) if column.type == "text" else pa.array(values)
    arrays = [
        columns[wanted.name] if wanted.name in columns else pa.nulls(count, wanted.type) for wanted in table.physical
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.physical)


def _texts(values: npt.NDArray[Any]) -> pa.Array[Any]:
    distinct, which = np.unique(values, return_inverse=True)
    return _named([clean_text(bytes(text).split(b"\0", 1)[0]) or None for text in distinct], which)


def _named(names: list[str | None], which: npt.NDArray[Any]) -> pa.Array[Any]:
    plain = pa.array(names, pa.string())
    # Two bytes that are cleaned to the same text must not be two entries of a dictionary.
    return plain.take(_indices(which)).dictionary_encode().cast(pa.dictionary(pa.int32(), pa.string()))


def _indices(which: npt.NDArray[Any]) -> pa.Array[Any]:
    return pa.array(np.asarray(which).reshape(-1).astype(np.int32), pa.int32())
