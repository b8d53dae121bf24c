"""Arrow batches from rows, for tables with few rows; the hot path builds its columns with numpy."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables import table_named

__all__ = ("Gathered", "batch_of", "integers", "ipc_bytes", "texts_and_indices")


class Gathered(io.RawIOBase):
    """A Python file for Arrow to write to, which is emptied as it fills. ``size``: bytes that wait to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._taken = 0
        self.size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._taken + self.size

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self.size += len(piece)
        return len(piece)

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._taken += self.size
        self.size = 0
        return data


def batch_of(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as a batch in the physical schema of ``table`` (its logical one for a live table); absent keys are NULL."""
    schema = table_named(table).physical
    return pa.RecordBatch.from_arrays(
        [_array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema
    )


def integers(array: pa.Array[Any], null: int = -1) -> npt.NDArray[np.int64]:
    """An array of integers or timestamps with ``null`` for NULL.

    From its buffers: pyarrow.compute takes 25 ms and some megabytes to import.
    """
    kind: Any = "<i8" if pa.types.is_timestamp(array.type) else array.type.to_pandas_dtype()
    valid: Any
    data: Any
    valid, data = array.buffers()
    end = array.offset + len(array)
    values = np.frombuffer(data, kind, end)[array.offset :].astype(np.int64) if data else np.zeros(len(array), np.int64)
    if valid is not None and array.null_count:
        known = np.unpackbits(np.frombuffer(valid, np.uint8), count=end, bitorder="little")[array.offset :]
        values[known == 0] = null
    return values


def texts_and_indices(array: Any) -> tuple[list[str | None], npt.NDArray[np.int64]]:
    """Of a dictionary array: (the distinct texts and at last None, for each row the index of its text)."""
    texts = [*array.dictionary.to_pylist(), None]
    return texts, integers(array.indices, len(texts) - 1)


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
