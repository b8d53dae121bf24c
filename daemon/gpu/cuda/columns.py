"""Columns of rows from columns of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables import table_named
from probing.daemon.source import Identity, Processes

__all__ = ("batch", "identities", "identity_columns", "numbers", "texts")

Array = npt.NDArray[Any]


def identities(processes: Processes, pids: Array, starts: Array) -> tuple[list[Identity | None], Array]:
    """(who each distinct process is, for each record the index of its process)."""
    keys = np.stack([pids.astype(np.uint64), starts.astype(np.uint64)])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    found = [processes.identity(int(pid), int(start)) for pid, start in distinct.T]
    return found, inverse.reshape(-1)


def identity_columns(
    node: str, who: Sequence[Identity | None], inverse: Array, pids: Array, starts: Array
) -> dict[str, pa.Array[Any]]:
    """node, job, run, pid, start_ns and rank of each record."""

    def each(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
        made: pa.Array[Any] = pa.array(values, kind).take(inverse)
        return made

    return {
        "node": pa.array([node] * len(inverse), pa.string()),
        "job": each([w and w.job for w in who], pa.string()),
        "run": each([w and w.run for w in who], pa.string()),
        "rank": each([None if w is None else w.rank for w in who], pa.int32()),
        "pid": numbers(pids.astype(np.int32)),
        "start_ns": numbers(starts.astype(np.int64)),
    }


def numbers(values: Array, unknown: Array | None = None) -> pa.Array[Any]:
    """NULL where ``unknown``."""
    made: pa.Array[Any] = pa.array(np.ascontiguousarray(values), mask=unknown)
    return made


def texts(index: Array, names: Mapping[int, str]) -> pa.Array[Any]:
    """The name of each number; NULL where it has none."""
    keys, inverse = np.unique(index, return_inverse=True)
    made: pa.Array[Any] = pa.array([names.get(int(key)) for key in keys], pa.string()).take(inverse.reshape(-1))
    return made


def batch(table: str, columns: Mapping[str, pa.Array[Any]]) -> pa.RecordBatch:
    """In the physical schema of ``table``."""
    schema = table_named(table).physical
    arrays = []
    for field in schema:
        array = columns[field.name]
        if isinstance(field.type, pa.DictionaryType):
            array = array.dictionary_encode()
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
