"""The merging task merges neighbouring segments of a table into one segment."""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.log.streams import conform
from probing.daemon.store.segments.encoding import ROW_GROUP, SegmentEncoder, sort_rows
from probing.daemon.store.segments.parquet import open_parquet
from probing.daemon.store.tasks.messages import Step, Turn
from probing.daemon.store.tasks.segment_output import PIECE_BYTES, Source, data_steps, end_steps

__all__ = ("merge",)

# The size of the rows that are sorted and encoded together, bytes. The peak memory is about six times as much.
_CHUNK_BYTES = 8 << 20
_BATCH_ROWS = 1 << 13
_CODES = pa.dictionary(pa.int32(), pa.string())


def merge(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Merges the segments ``sources``, in order.

    Fields: ``table``, ``sort_by``, ``coded`` (columns with few values), ``expected`` ([path, size, CRC32] by source).
    Raises FormatError for a damaged source.
    """
    for source, (path, size, crc) in zip(sources, fields["expected"], strict=True):
        if _checksum(source) != (size, crc):
            raise FormatError(f"the segment {path} is damaged: its size or checksum is wrong")
        yield Turn()
    encoder = SegmentEncoder(str(fields["table"]))
    for rows in _merged_rows(sources, tuple(fields["sort_by"]), list(fields["coded"])):
        yield from data_steps(encoder.add(rows))
        yield Turn()
    yield from end_steps(encoder)


def _checksum(source: Source) -> tuple[int, int]:
    size = crc = 0
    source.seek(0)
    while data := source.read(PIECE_BYTES):
        size, crc = size + len(data), zlib.crc32(data, crc)
    return size, crc


def _merged_rows(sources: Sequence[Source], sort_by: tuple[str, ...], coded: Collection[str]) -> Iterator[pa.Table]:
    """Yields row groups of one schema with the rows of ``sources`` in order; each group is sorted.

    Text columns ``coded`` are dictionaries in memory. Memory and time for a group do not grow with the number of
    sources.
    """
    schemas = []
    for source in sources:
        with _opened(source, coded) as file:
            schemas.append(_plain(file.schema_arrow))
    # Later sources can have columns that the table did not have before.
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


def _opened(source: Source, coded: Collection[str]) -> Any:
    source.seek(0)
    # The source is wrapped: the ParquetFile closes its file, but the source is read again later.
    return open_parquet(pa.PythonFile(_Unclosed(source), mode="r"), coded)


class _Unclosed(io.RawIOBase):
    """A view of ``file``: closing the view leaves ``file`` open."""

    def __init__(self, file: Source) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size) or b""


def _batches(sources: Sequence[Source], coded: Collection[str]) -> Iterator[pa.Table]:
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
    # Columns are converted one by one, so that only one column is in memory twice at a time.
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
