"""Makes Arrow columns and batches from numpy columns of records: a whole column at a time, without Python code for each
row.

Texts and identities are looked up once for each distinct process, communicator or name. ``which`` is always the inverse
of ``numpy.unique``: for each row the index of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables import table_named
from probing.daemon.source import Identity, Processes

__all__ = (
    "Array",
    "batch",
    "flags",
    "identities",
    "identity_columns",
    "integers",
    "named",
    "number_columns",
    "numbers",
    "texts",
    "times",
)

Array = npt.NDArray[Any]
# The maximum number of texts of a dictionary that is kept for later batches. Larger dictionaries hold texts from
# watched processes, which seldom recur.
MAX_KEPT_TEXTS = 64


def batch(table: str | pa.Schema, columns: Mapping[str, pa.Array[Any]]) -> pa.RecordBatch:
    """Returns columns as a batch in the physical schema of ``table``; each column is cast to the type of its field.

    Raises KeyError if a column of the schema is missing.
    """
    schema = table if isinstance(table, pa.Schema) else table_named(table).physical
    arrays = [_cast(columns[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def identities(processes: Processes, pids: Array, starts: Array) -> tuple[list[Identity | None], npt.NDArray[np.intp]]:
    """Returns the identity of each distinct (pid, start_ns), and for each row the index of its identity."""
    pid_of = np.unique(pids, return_inverse=True)[1]
    distinct, start_of = np.unique(starts, return_inverse=True)
    _, first, which = np.unique(pid_of * len(distinct) + start_of, return_index=True, return_inverse=True)
    return [processes.identity(int(pids[row]), int(starts[row])) for row in first], which


def identity_columns(
    node: str, processes: Sequence[Identity | None], which: Array, pids: Array, starts: Array
) -> dict[str, pa.Array[Any]]:
    """Returns the columns node, job, run, pid, start_ns and rank. ``processes`` and ``which``: the result of
    ``identities``.
    """
    return {
        "node": named(np.zeros(len(which), np.int32), (node,)),
        "job": texts([None if one is None else one.job for one in processes], which),
        "run": texts([None if one is None else one.run for one in processes], which),
        "pid": numbers(pids.astype(np.int32)),
        "start_ns": numbers(starts.astype(np.int64)),
        "rank": integers([None if one is None else one.rank for one in processes], which),
    }


def numbers(values: Array, null: Array | None = None) -> pa.Array[Any]:
    """Returns a column of numbers in their numpy type; NULL where ``null`` is True.

    Made from buffers, since ``pa.array`` looks for pandas at each call, which costs more than a small batch.
    """
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [_validity(null), pa.py_buffer(values.view(np.uint8).data)]
    )


def number_columns(values: Array, null: Array) -> list[pa.Array[Any]]:
    """Returns an Arrow column for each column of ``values[row, column]``; NULL where ``null[row, column]`` is True.
    Cheaper than a call of ``numbers`` for each column.
    """
    kind, count = pa.from_numpy_dtype(values.dtype), len(values)
    data = np.ascontiguousarray(values.T)
    some: list[bool] = np.any(null, axis=0).tolist()
    validity = np.ascontiguousarray(np.packbits(~null.T, axis=1, bitorder="little"))
    return [
        pa.Array.from_buffers(kind, count, [pa.py_buffer(validity[at]) if some[at] else None, pa.py_buffer(data[at])])
        for at in range(len(data))
    ]


def times(utc_ns: Array, null: Array | None = None) -> pa.Array[Any]:
    """Returns UTC ns as a column of timestamps; NULL where ``null`` is True."""
    return numbers(utc_ns, null).view(pa.timestamp("ns"))


def flags(values: Array, null: Array | None = None) -> pa.Array[Any]:
    """Returns a column of booleans; NULL where ``null`` is True."""
    packed = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [_validity(null), pa.py_buffer(packed.data)])


def named(index: Array, known: Sequence[str]) -> pa.Array[Any]:
    """Returns a dictionary array with ``known[index]`` for each row; NULL for an index outside of ``known``."""
    outside = (index < 0) | (index >= len(known))
    dictionary = _dictionary(tuple(known)) if len(known) <= MAX_KEPT_TEXTS else pa.array(known, pa.string())
    return pa.DictionaryArray.from_arrays(numbers(index.astype(np.int32, copy=False), outside), dictionary)


def texts(values: Sequence[str | None], which: Array) -> pa.Array[Any]:
    """Returns ``values[which]`` as a dictionary array whose dictionary has no duplicates. ``which``: for each row, an
    index into ``values``.
    """
    distinct = sorted({value for value in values if value is not None})
    place = {value: index for index, value in enumerate(distinct)}
    return named(np.array([-1 if value is None else place[value] for value in values], np.int32)[which], distinct)


def integers(values: Sequence[int | None], which: Array) -> pa.Array[Any]:
    """Returns ``values[which]`` as a column of 32-bit integers. ``which``: for each row, an index into ``values``."""
    found = np.array([0 if value is None else value for value in values], np.int32)[which]
    return numbers(found, np.array([value is None for value in values], bool)[which])


@lru_cache(maxsize=256)
def _dictionary(known: tuple[str, ...]) -> pa.Array[Any]:
    return pa.array(known, pa.string())


def _validity(null: Array | None) -> Any:
    if null is None or not null.any():
        return None
    return pa.py_buffer(np.packbits(~null, bitorder="little").data)


def _cast(array: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    return array if array.type == kind else array.cast(kind)
