"""Builds Arrow batches from rows (dicts), for tables with few rows, and encodes batches. The hot path uses
``daemon.columns``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.tables import table_named

__all__ = ("Gathered", "batch_of", "ipc_bytes")


class Gathered(io.RawIOBase):
    """A file in memory to which Arrow writes. ``take`` returns the bytes written since its last call. ``size``: the
    number of bytes that the next ``take`` returns.
    """

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
    """Returns rows as a batch in the physical schema of ``table``; for a live table this is the logical schema.
    Missing keys become NULL.
    """
    schema = table_named(table).physical
    # All rows are converted in one call, because ``pa.array`` looks for pandas at each call.
    structs: Any = pa.array(rows, pa.struct(list(schema)))
    return pa.RecordBatch.from_arrays(structs.flatten(), schema=schema)


def ipc_bytes(batch: pa.RecordBatch) -> bytes:
    """Returns the batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
