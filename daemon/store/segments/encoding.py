"""Encodes rows as a segment: chooses their order, the encoding of each column, and which columns have statistics."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.arrow import Gathered

__all__ = ("GROUPS", "META", "ROW_GROUP", "SegmentEncoder", "column_numbers", "sort_rows")

# Keys of the file's metadata: the name of the table, and the CRC32 of each row group's bytes.
META = "probingd.segment"
GROUPS = "probingd.groups"
ROW_GROUP = 1 << 17
# Columns whose statistics help pruning. The statistics of all other columns would be most of a small file's footer.
_NARROWED_BY = frozenset(("ts", "job", "pid", "rank", "comm", "seq", "step", "stack_id"))
# Encodings are tried on rows from this many places in the table: the rows are sorted, so one place may have rows of one
# process only.
_TRIED_PLACES = 4
_TRIED_ROWS = 4096
_TRIED_BYTES = 1 << 19
# For fewer rows than this, no encodings are tried, because that would make encoding take three times as long. They are
# tried when the segment is merged.
_FEW_ROWS = 64
# A column keeps its dictionary if the dictionary encodes it in less than this many bytes a row.
_SMALL = 0.02
# Another encoding must need less than this share of the dictionary's bytes, because dictionary codes are compared
# faster than values.
_GAIN = 0.97
_RIVALS: Mapping[str, tuple[str, ...]] = {
    "INT32": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT64": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "FLOAT": ("BYTE_STREAM_SPLIT", "PLAIN"),
    "DOUBLE": ("BYTE_STREAM_SPLIT", "PLAIN"),
    "BYTE_ARRAY": ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"),
}


def sort_rows(rows: pa.Table, sort_by: Sequence[str]) -> pa.Table:
    """Returns ``rows`` sorted by the columns ``sort_by`` that they have; the sort is stable."""
    keys = [_sort_key(rows.column(name)) for name in reversed(sort_by) if name in rows.column_names]
    order: np.ndarray[Any, Any] = np.lexsort(keys) if keys else np.arange(rows.num_rows)
    return rows.take(pa.array(order, pa.int64()))


class SegmentEncoder:
    """Encodes a segment of ``table``, one row group at a time. The first rows decide the encoding of the columns.

    ``size`` and ``crc`` are the number and the CRC32 of all bytes returned so far.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._sink = Gathered()
        self._writer: Any = None
        self._groups: list[int] = []
        self.size = self.crc = self.rows = 0

    def add(self, rows: pa.Table) -> memoryview:
        """Returns the bytes of a row group with ``rows``."""
        before = b""
        if self._writer is None:
            self._writer = self._begin(rows)
            before = self._sink.take()
        self._writer.write_table(rows, row_group_size=rows.num_rows)
        data = self._sink.take()
        self._groups.append(zlib.crc32(data))
        self.rows += rows.num_rows
        return self._given(before + data if before else data)

    def end(self) -> memoryview:
        """Returns the bytes of the footer."""
        self._writer.add_key_value_metadata({GROUPS: " ".join(f"{crc:08x}" for crc in self._groups)})
        self._writer.close()
        return self._given(self._sink.take())

    def _begin(self, rows: pa.Table) -> Any:
        codes, encodings = _layout(rows)
        # Float columns, which the tables of a job may have, get no statistics. Statistics ignore NaN, which DuckDB
        # takes as the largest number, so DuckDB would skip rows with NaN.
        fields = [field for field in rows.schema if field.name in _NARROWED_BY]
        statistics = [field.name for field in fields if not pa.types.is_floating(field.type)]
        writer = _writer(self._sink, rows.schema, codes, encodings, statistics)
        writer.add_key_value_metadata({META: self._table})
        return writer

    def _given(self, data: bytes) -> memoryview:
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)
        return memoryview(data)


def _writer(sink: Any, schema: pa.Schema, codes: Any, encodings: dict[str, str], statistics: Any) -> Any:
    # Imported late: pyarrow.parquet costs memory and start-up time even in a daemon that seals nothing.
    import pyarrow.parquet as pq

    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=codes,
        column_encoding=encodings or None,
        write_statistics=statistics,
        write_page_checksum=True,
        store_schema=False,
        version="2.6",
    )


# Returns the paths of the leaf columns with a dictionary, and the encodings of the other leaf columns.
def _layout(rows: pa.Table) -> tuple[list[str], dict[str, str]]:
    if rows.num_rows < _FEW_ROWS:
        return [], {}
    sample = _sample(rows)
    coded = _tried(sample, True, {})
    best = {path: (size, "") for path, (_, size) in coded.items()}
    rivals = {
        path: _RIVALS[kind]
        for path, (kind, size) in coded.items()
        if kind in _RIVALS and size > _SMALL * sample.num_rows
    }
    rest = sample.select(sorted({path.split(".")[0] for path in rivals} & set(sample.column_names)))
    for turn in range(max(map(len, rivals.values()), default=0)):
        encodings = {path: names[turn] for path, names in rivals.items() if turn < len(names)}
        for path, (_, size) in _tried(rest, False, encodings).items():
            if path in encodings and size < best[path][0] * (1.0 if best[path][1] else _GAIN):
                best[path] = (size, encodings[path])
    # A column that is all NULL in the sample may hold timestamps in other rows. Timestamps are the worst case for a
    # dictionary.
    unseen = {name for name in sample.column_names if sample.column(name).null_count == sample.num_rows}
    best |= {path: (0, "BYTE_STREAM_SPLIT") for path in unseen if path in coded and coded[path][0] == "INT64"}
    codes = [path for path, (_, encoding) in best.items() if not encoding and coded[path][0] != "BOOLEAN"]
    return codes, {path: encoding for path, (_, encoding) in best.items() if encoding}


def _sample(rows: pa.Table) -> pa.Table:
    each = min(_TRIED_ROWS, max(1, _TRIED_BYTES * rows.num_rows // max(1, rows.nbytes)))
    if rows.num_rows <= _TRIED_PLACES * each:
        return rows
    step = (rows.num_rows - each) // (_TRIED_PLACES - 1)
    return pa.concat_tables([rows.slice(place * step, each) for place in range(_TRIED_PLACES)])


# Returns the physical type and the size in bytes of each leaf column.
def _tried(rows: pa.Table, codes: bool, encodings: dict[str, str]) -> dict[str, tuple[str, int]]:
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with _writer(sink, rows.schema, codes, encodings, False) as writer:
        writer.write_table(rows)
    group = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0)
    leaves = (group.column(i) for i in range(group.num_columns))
    return {leaf.path_in_schema: (leaf.physical_type, leaf.total_compressed_size) for leaf in leaves}


def _sort_key(column: pa.ChunkedArray[Any]) -> np.ndarray[Any, Any]:
    if pa.types.is_string(column.type):
        column = column.dictionary_encode()
    if not pa.types.is_dictionary(column.type):
        return column_numbers(column)
    array: Any = column.unify_dictionaries().combine_chunks()
    names = array.dictionary.to_pylist()
    rank = {name: i for i, name in enumerate(sorted(set(names)), 1)}
    ranks = np.array([0, *(rank[name] for name in names)])
    return np.asarray(ranks[column_numbers(array.indices, null=-1) + 1])


def column_numbers(column: Any, null: int = 0) -> np.ndarray[Any, Any]:
    """Returns the values of a column of integers, floats, booleans or times, with ``null`` for NULL."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(null)
    return np.asarray(column)
