"""How the rows of a segment lie in its Parquet file: their order, the encoding of each column, what has statistics."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from probing.daemon.arrow import Gathered

__all__ = ("GROUPS", "META", "ROW_GROUP", "SegmentEncoder", "column_numbers", "encode_rows", "sort_rows")

# Keys in the file's metadata: the table's name, and CRC32 of the bytes of each row group.
META = "probingd.segment"
GROUPS = "probingd.groups"
ROW_GROUP = 1 << 17
# Columns that queries narrow by. Of others the least and the largest value would be most of a small file's footer.
_NARROWED_BY = frozenset(("ts", "job", "pid", "rank", "comm", "seq", "step", "stack_id"))
# Encodings are tried on rows from several places: a table is sorted, and one place may hold but one process.
_TRIED_PLACES = 4
_TRIED_ROWS = 4096
_TRIED_BYTES = 1 << 19
# A column that has codes for less than so many bytes a row is left so.
_SMALL = 0.02
# Codes are compared faster than values: another encoding must be shorter by this share.
_GAIN = 0.97
_RIVALS: Mapping[str, tuple[str, ...]] = {
    "INT32": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT64": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "FLOAT": ("BYTE_STREAM_SPLIT", "PLAIN"),
    "DOUBLE": ("BYTE_STREAM_SPLIT", "PLAIN"),
    "BYTE_ARRAY": ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"),
}


def sort_rows(rows: pa.Table, sort_by: Sequence[str]) -> pa.Table:
    """``rows`` by those of these columns that there are; equal ones stay in their order."""
    keys = [_sort_key(rows.column(name)) for name in reversed(sort_by) if name in rows.column_names]
    order: np.ndarray[Any, Any] = np.lexsort(keys) if keys else np.arange(rows.num_rows)
    return rows.take(pa.array(order, pa.int64()))


class SegmentEncoder:
    """A segment of ``table``, made one row group at a time. ``size`` and ``crc`` are of all bytes given out so far.

    Columns are encoded as suits the first rows.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._sink = Gathered()
        self._writer: Any = None
        self._groups: list[int] = []
        self.size = self.crc = self.rows = 0

    def add(self, rows: pa.Table) -> memoryview:
        """The bytes of a row group, which ``rows`` become."""
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
        """The footer."""
        self._writer.add_key_value_metadata({GROUPS: " ".join(f"{crc:08x}" for crc in self._groups)})
        self._writer.close()
        return self._given(self._sink.take())

    def _begin(self, rows: pa.Table) -> Any:
        codes, encodings = _layout(rows)
        statistics = [name for name in rows.column_names if name in _NARROWED_BY]
        writer = _writer(self._sink, rows.schema, codes, encodings, statistics)
        writer.add_key_value_metadata({META: self._table})
        return writer

    def _given(self, data: bytes) -> memoryview:
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)
        return memoryview(data)


def encode_rows(table: str, rows: pa.Table) -> bytes:
    """A segment of ``table`` with ``rows``, which are sorted."""
    encoder = SegmentEncoder(table)
    starts = range(0, max(1, rows.num_rows), ROW_GROUP)
    return b"".join([*(encoder.add(rows.slice(start, ROW_GROUP)) for start in starts), encoder.end()])


def _writer(sink: Any, schema: pa.Schema, codes: Any, encodings: dict[str, str], statistics: Any) -> Any:
    # pyarrow.parquet costs memory and start-up time that a daemon which seals nothing need not pay.
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


# Leaf columns, by their paths in the file: those that have codes into a dictionary, and the encodings of others.
def _layout(rows: pa.Table) -> tuple[list[str], dict[str, str]]:
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
    # What is NULL in the first rows of a merged segment can be a time in later ones, which codes suit least.
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


# Physical type and bytes of each leaf.
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
    """The values of a column of integers, floats, truth values or times, with ``null`` where there is none."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(null)
    return np.asarray(column)
