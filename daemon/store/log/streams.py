"""Encodes batches as the Arrow IPC streams of a log part, one stream for each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import InternalError
from probing.api.tables import TABLES, Table
from probing.daemon.arrow import Gathered
from probing.daemon.store.log.records import Chunk

__all__ = ("StreamWriters", "conform")

_OPTIONS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, use_threads=False)


class StreamWriters:
    """The Arrow streams of one log part, one for each table.

    If a record cannot be written, the encoders of the streams have already advanced past what is in the file. Nothing
    may be appended to this part any more; the next part starts with new streams.
    """

    def __init__(self, tables: Mapping[str, Table] = TABLES) -> None:
        self._tables = tables
        self._streams: dict[str, _Stream] = {}

    def encode(self, batches: Mapping[str, Sequence[pa.RecordBatch]]) -> list[Chunk]:
        """Returns the next chunk of each table with rows.

        Raises InternalError for a table that is not stored, or a batch that does not have its table's schema.
        """
        ready = {name: [b for b in group if b.num_rows] for name, group in batches.items()}
        schemas = {name: self._schema(name) for name, group in ready.items() if group}
        fitted = {name: [_fit(name, batch, schema) for batch in ready[name]] for name, schema in schemas.items()}
        # The checks above touch no stream, so a batch that does not fit leaves the streams as they were.
        chunks = []
        for name, group in fitted.items():
            stream = self._streams.get(name) or self._streams.setdefault(name, _Stream(schemas[name]))
            chunks.append(Chunk(name, stream.encode(group), sum(b.num_rows for b in group)))
        return chunks

    def outdated(self, names: Iterable[str]) -> bool:
        """Returns whether the schema of any of the tables ``names`` has changed since its stream began: a table of a
        user can get new columns.
        """
        begun = ((self._streams[name].schema, self._schema(name)) for name in names if name in self._streams)
        return any(was is not now and was != now for was, now in begun)

    def _schema(self, name: str) -> pa.Schema:
        table = self._tables.get(name)
        if table is None or table.live:
            raise InternalError(f"{name} is not a stored table")
        return table.physical


class _Stream:
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._names = {i: _Names(f.type) for i, f in enumerate(schema) if isinstance(f.type, pa.DictionaryType)}
        self._out = Gathered()
        # Arrow writes each buffer and its padding separately. The buffered stream joins most of these writes.
        self._sink = pa.BufferedOutputStream(pa.PythonFile(self._out, mode="w"), 1 << 16)
        self._writer = pa.ipc.new_stream(self._sink, schema, options=_OPTIONS)

    def encode(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        for batch in batches:
            columns: list[Any] = list(batch.columns)
            for i, names in self._names.items():
                columns[i] = names.encode(columns[i])
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.schema))
        self._sink.flush()
        return self._out.take()


class _Names:
    """The dictionary of one column in one stream. The dictionary only grows, so Arrow writes only the new values (a
    delta).
    """

    def __init__(self, kind: pa.DictionaryType[Any, Any, Any]) -> None:
        self._kind = kind
        self._codes: dict[str, int] = {}
        self._values = pa.array([], kind.value_type)
        self._seen: tuple[pa.Array[Any], pa.Array[Any] | None] | None = None

    def encode(self, column: pa.DictionaryArray[Any, Any]) -> pa.DictionaryArray[Any, Any]:
        moved = self._moved(column.dictionary)
        indices = column.indices if moved is None else moved.take(column.indices)
        return pa.DictionaryArray.from_arrays(indices, self._values, safe=False)

    def _moved(self, dictionary: pa.Array[Any]) -> pa.Array[Any] | None:
        # Returns None if the codes need no change. Batches of a source share a dictionary, so the last dictionary is
        # cached.
        if self._seen is not None and self._seen[0].equals(dictionary):
            return self._seen[1]
        names = dictionary.to_pylist()
        new = [name for name in dict.fromkeys(names) if name is not None and name not in self._codes]
        if new:
            self._codes.update(zip(new, range(len(self._codes), len(self._codes) + len(new)), strict=True))
            self._values = pa.concat_arrays([self._values, pa.array(new, self._kind.value_type)])
        codes = [None if name is None else self._codes[name] for name in names]
        moved = None if codes == list(range(len(codes))) else pa.array(codes, self._kind.index_type)
        self._seen = (dictionary, moved)
        return moved


def _fit(name: str, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    unknown = set(batch.schema.names) - set(schema.names)
    if unknown:
        raise InternalError(f"{name} has no column {min(unknown)}")
    try:
        return conform(pa.Table.from_batches([batch]), schema).combine_chunks().to_batches()[0]
    except pa.ArrowException as e:
        raise InternalError(f"a batch does not fit {name}: {e}") from e


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns ``table`` in ``schema``: columns that ``table`` lacks are NULL, columns that ``schema`` lacks are left
    out.

    Raises pa.ArrowException when a column cannot be cast.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        columns.append(_cast(table.column(index), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray[Any], kind: pa.DataType) -> pa.ChunkedArray[Any]:
    if column.type.equals(kind):
        return column
    if isinstance(column.type, pa.DictionaryType):
        column = column.cast(column.type.value_type)
    if not isinstance(kind, pa.DictionaryType):
        return column.cast(kind)
    return column.cast(kind.value_type).dictionary_encode().cast(kind)
