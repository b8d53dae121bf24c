"""Arrow batches from rows, for tables with few rows; the hot path builds its columns with numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.tables import table_named

__all__ = ("batch_of", "ipc_bytes")


def batch_of(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as a batch in the physical schema of ``table`` (its logical one for a live table); absent keys are NULL."""
    schema = table_named(table).physical
    return pa.RecordBatch.from_arrays(
        [_array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema
    )


def _array(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
    if isinstance(kind, pa.DictionaryType):
        array: pa.Array[Any] = pa.array(values, kind.value_type).dictionary_encode().cast(kind)
        return array
    return pa.array(values, kind)


def ipc_bytes(batch: pa.RecordBatch) -> bytes:
    """The batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
