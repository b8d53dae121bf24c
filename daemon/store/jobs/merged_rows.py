"""The rows of neighbouring segments, one row group of their merged segment after the other."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.store.log.streams import conform
from probing.daemon.store.segments.encoding import ROW_GROUP, sort_rows
from probing.daemon.store.segments.parquet import open_parquet

__all__ = ("merged_rows",)

# Of rows that are sorted and encoded together, before compression: some six times as much memory is used for a moment.
_CHUNK_BYTES = 8 << 20
_BATCH_ROWS = 1 << 13
_CODES = pa.dictionary(pa.int32(), pa.string())


def merged_rows(sources: Sequence[Any], sort_by: tuple[str, ...], coded: Collection[str]) -> Iterator[pa.Table]:
    """Row groups of one schema with the rows of ``sources`` in order, each sorted by itself.

    Text columns ``coded`` are dictionaries in memory. Neither memory nor the time for one grows with the sources.
    """
    schemas = []
    for source in sources:
        with _opened(source, coded) as file:
            schemas.append(_plain(file.schema_arrow))
    # A table may have gained columns in between.
    schema = _coded(pa.unify_schemas(schemas, promote_options="permissive"), coded)
    pending: list[pa.Table] = []
    rows = size = 0
    for batch in _batches(sources, coded):
        fitting = conform(batch, schema)
        pending.append(fitting)
        rows, size = rows + batch.num_rows, size + fitting.nbytes
        if rows >= ROW_GROUP or size >= _CHUNK_BYTES:
            yield _sorted(pending, sort_by)
            rows = size = 0
    if pending:
        yield _sorted(pending, sort_by)


def _opened(source: Any, coded: Collection[str]) -> Any:
    source.seek(0)
    # Wrapped, as the source outlives the ParquetFile, which closes what it was given.
    return open_parquet(pa.PythonFile(_Unclosed(source), mode="r"), coded)


class _Unclosed(io.RawIOBase):
    """A file that somebody else closes."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        return bytes(self._file.read(size))


def _batches(sources: Sequence[Any], coded: Collection[str]) -> Iterator[pa.Table]:
    for source in sources:
        with _opened(source, coded) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                yield pa.Table.from_batches([batch])


def _sorted(pending: list[pa.Table], sort_by: tuple[str, ...]) -> pa.Table:
    rows = pa.concat_tables(pending).unify_dictionaries()
    pending.clear()
    keys = rows.select([name for name in sort_by if name in rows.column_names])
    keys = keys.append_column("", pa.array(np.arange(rows.num_rows)))
    order = sort_rows(keys, sort_by).column(keys.num_columns - 1)
    # One column after the other, so that there are never two of all.
    schema, columns = rows.schema, list(rows.columns)
    del rows, keys
    for i in range(len(columns)):
        columns[i] = columns[i].take(order)
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(schema: pa.Schema) -> pa.Schema:
    for i, field in enumerate(schema):
        if isinstance(field.type, pa.DictionaryType):
            schema = schema.set(i, field.with_type(field.type.value_type))
    return schema


def _coded(schema: pa.Schema, coded: Collection[str]) -> pa.Schema:
    for i, field in enumerate(schema):
        if field.name in coded and pa.types.is_string(field.type):
            schema = schema.set(i, field.with_type(_CODES))
    return schema
