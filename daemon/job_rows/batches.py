"""Makes Arrow batches from rows that a job wrote: typed columns, and the identity of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.tables import Table
from probing.api.tables.python import TRACE_EVENT, TRAINING_METRICS
from probing.api.tables.user import job_columns
from probing.daemon.clock import ClockPair
from probing.daemon.columns import batch, identity_columns, named, numbers, times
from probing.daemon.job_rows.memory import Rows
from probing.daemon.source import Identity
from probing.rows import NO_INTEGER, NO_TEXT
from probing.spans import METRICS, TRACE

__all__ = ("BUILT_IN", "job_batch", "metric_batch", "span_batch")

_RECORD_TYPES = ("span_start", "span_end", "event")
# The columns of the tables that the library ``probing`` itself writes: types by name.
BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "trace_event": {name: kind for name, kind, _ in TRACE},
    "training_metrics": {name: kind for name, kind, _ in METRICS},
}


def job_batch(
    node: str, who: Identity, rows: Rows, columns: Mapping[str, str], table: Table, pair: ClockPair
) -> pa.RecordBatch:
    """Returns the rows as a batch of ``table``, which is made by ``job_table`` and has all of ``columns``."""
    found = _common(node, who, rows, pair)
    found["timestamp"] = numbers(
        np.where(rows["time"] == NO_INTEGER, (rows["mono_ns"] + pair.mono_to_utc_ns) // 1000, rows["time"])
    )
    for column, kinds in job_columns(table).items():
        for place, kind in zip([column, *(f"{column}__{kind}" for kind in kinds[1:])], kinds, strict=True):
            found[place] = (
                _column(rows, column, kind)
                if columns.get(column) == kind
                else pa.nulls(len(rows), table.physical.field(place).type)
            )
    return batch(table.physical, found)


def span_batch(node: str, who: Identity, rows: Rows, pair: ClockPair) -> pa.RecordBatch:
    """Returns rows of spans and events as a batch of ``python.trace_event``."""
    kinds = dict(BUILT_IN["trace_event"])
    del kinds["record_type"]
    return batch(
        TRACE_EVENT.physical,
        {
            **_common(node, who, rows, pair),
            **{name: _column(rows, name, kind) for name, kind in kinds.items()},
            "record_type": named(rows[":record_type"].clip(-1, len(_RECORD_TYPES)), _RECORD_TYPES),
        },
    )


def metric_batch(node: str, who: Identity, rows: Rows, pair: ClockPair) -> pa.RecordBatch:
    """Returns the metrics, and the times at which steps begin, as a batch of ``python.training_metrics``."""
    values = rows[":value"]
    loss = np.where(rows[":name"] == b"loss", values, np.nan)
    return batch(
        TRAINING_METRICS.physical,
        {
            **_common(node, who, rows, pair),
            **{name: _column(rows, name, kind) for name, kind in BUILT_IN["training_metrics"].items()},
            "loss": numbers(loss, np.isnan(loss)),
        },
    )


def _common(node: str, who: Identity, rows: Rows, pair: ClockPair) -> dict[str, pa.Array[Any]]:
    count = len(rows)
    which, pids = np.zeros(count, np.intp), np.full(count, who.pid)
    found = identity_columns(node, [who], which, pids, np.full(count, who.start_ns))
    # A process cannot write before it starts: earlier times, which a job may write, are replaced.
    earliest = who.start_ns - pair.boot_ns + pair.mono_ns
    found["ts"] = times(np.maximum(rows["mono_ns"], earliest) + pair.mono_to_utc_ns)
    return found


def _column(rows: Rows, name: str, kind: str) -> pa.Array[Any]:
    values = rows[f":{name}"]
    if kind == "i64":
        return numbers(values, values == NO_INTEGER)
    if kind == "f64":
        return numbers(values, np.isnan(values))
    distinct, which = np.unique(values, return_inverse=True)
    # Only the distinct texts are decoded: they are few. A text that was cut may end within a character.
    texts = [None if text == NO_TEXT else text.decode(errors="ignore") for text in distinct.tolist()]
    place = numbers(which.astype(np.int32))
    return pa.DictionaryArray.from_arrays(place, pa.array(texts, pa.string())).dictionary_decode()
