"""Holds the rows of a stream back until all of them have come."""

from __future__ import annotations

import tempfile
from collections.abc import Generator

import pyarrow as pa

from probing.api.errors import QueryMemory
from probing.api.text import size
from probing.federation.execution.answer import Rows

__all__ = ("MAX_BYTES", "held_back")

MAX_BYTES = 4 << 30


def held_back(rows: Rows, max_bytes: int = MAX_BYTES) -> Rows:
    """Returns ``rows`` such that the first batch comes after the last has arrived, so that an error precedes all rows.

    They wait in an unnamed file in the temporary directory. Raises QueryMemory, when read, beyond ``max_bytes``.
    """
    return Rows(rows.schema, _batches(rows, max_bytes), rows.warnings, rows.close)


def _batches(rows: Rows, max_bytes: int) -> Generator[pa.RecordBatch, None, None]:
    with rows, tempfile.TemporaryFile(prefix="probing-rows-") as file:
        with pa.ipc.new_stream(file, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
                if file.tell() > max_bytes:
                    raise QueryMemory(
                        f"the answer is larger than the {size(max_bytes)} that --strict holds back",
                        hint="narrow the time range, or leave --strict away: rows are then written as they come",
                    )
        file.seek(0)
        yield from pa.ipc.open_stream(file)
