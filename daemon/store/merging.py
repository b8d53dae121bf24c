"""Neighbouring segments into one, a piece at a time: neither memory nor time grows with their size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.arrow import Gathered
from probing.daemon.store.encoding import ROW_GROUP, segment_writer, sort_rows
from probing.daemon.store.files import Files, checksum, write_all
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments import all_jobs, check_segment, open_segment
from probing.daemon.store.streams import conform

__all__ = ("Merge",)

# Of rows that are sorted and encoded together, before compression: some six times as much memory is used for a moment.
_CHUNK_BYTES = 8 << 20
_BATCH_ROWS = 1 << 13
_CODES = pa.dictionary(pa.int32(), pa.string())


class Merge:
    """Segments of one table and date, consecutive in ``parts``, on their way to be one.

    Each row group holds the rows of consecutive log parts, sorted as the table says: its statistics are as narrow in
    time as those of the segments that it came from. After an error only ``abort`` may be called.
    """

    def __init__(self, files: Files, root: Path, sources: Sequence[Segment], table: Table | None) -> None:
        self.sources = tuple(sources)
        first, last = sources[0], sources[-1]
        self.path = f"{first.path.rsplit('/', 1)[0]}/{first.parts[0]:012d}-{last.parts[1]:012d}.parquet"
        self.written = 0
        self._files = files
        self._root = root
        self._target = root / self.path
        self._aside = self._target.with_name(f"{self._target.name}.tmp")
        self._sort_by = table.sort_by if table else ("ts",)
        physical = table.physical if table else pa.schema([])
        self._names = [f.name for f in physical if isinstance(f.type, pa.DictionaryType)]
        self._chunks = self._read()
        self._sink = Gathered()
        self._writer: Any = None
        self._fd: int | None = None
        self._crc = self._rows = 0

    def step(self) -> Segment | None:
        """Merge one more row group; the new segment when it was the last, in its place and synced.

        Raises FormatError when a source is damaged or they do not fit together, OSError.
        """
        try:
            chunk = next(self._chunks, None)
        except (pa.ArrowException, OSError) as e:
            if getattr(e, "errno", None) is not None:
                raise
            raise FormatError(f"{self.path} cannot be made: {e}") from e
        if chunk is not None:
            self._write(chunk)
            return None
        return self._finish()

    def abort(self) -> None:
        """Leave nothing behind. Raises OSError."""
        self._close()
        self._files.unlink(self._aside)

    def _write(self, rows: pa.Table) -> None:
        if self._fd is None:
            self._files.unlink(self._aside)
            self._fd = self._files.create(self._aside)
            self._writer = segment_writer(self._sink, self.sources[0].table, rows)
        self._writer.write_table(rows, row_group_size=rows.num_rows)
        self._rows += rows.num_rows
        self._flush()

    def _flush(self) -> None:
        data = self._sink.take()
        assert self._fd is not None
        write_all(self._files, self._fd, data)
        self._crc = zlib.crc32(data, self._crc)
        self.written += len(data)

    def _finish(self) -> Segment:
        assert self._fd is not None
        self._writer.close()
        self._flush()
        self._files.fsync(self._fd)
        self._close()
        rows = sum(s.rows for s in self.sources)
        if self._rows != rows:
            raise FormatError(f"{self.path} would have {self._rows} rows instead of {rows}")
        if checksum(self._files, self._aside) != (self.written, self._crc):
            raise FormatError(f"the segment {self.path} reads back differently than it was written")
        self._files.rename(self._aside, self._target)
        self._files.fsync_dir(self._target.parent)
        return Segment(
            self.sources[0].table,
            self.path,
            self.written,
            self._crc,
            rows,
            min(s.ts_min for s in self.sources),
            max(s.ts_max for s in self.sources),
            (self.sources[0].parts[0], self.sources[-1].parts[1]),
            all_jobs(self.sources),
        )

    def _close(self) -> None:
        self._chunks = iter(())
        self._writer = None
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)

    def _read(self) -> Iterator[pa.Table]:
        # Row groups of one schema: a table may have gained columns in between.
        schemas = []
        for source in self.sources:
            with self._open(source) as file:
                schemas.append(file.schema_arrow)
        schema = self._coded(pa.unify_schemas([_plain(s) for s in schemas], promote_options="permissive"))
        pending: list[pa.Table] = []
        rows = size = 0
        for batch in self._batches():
            fitting = conform(batch, schema)
            pending.append(fitting)
            rows, size = rows + batch.num_rows, size + fitting.nbytes
            if rows >= ROW_GROUP or size >= _CHUNK_BYTES:
                yield self._sorted(pending)
                rows = size = 0
        if pending:
            yield self._sorted(pending)

    def _open(self, source: Segment) -> Any:
        return open_segment(self._files, self._root / source.path, source.size, self._names)

    def _coded(self, schema: pa.Schema) -> pa.Schema:
        """With dictionaries in memory for what has few values, however each source encodes it."""
        for i, field in enumerate(schema):
            if field.name in self._names and pa.types.is_string(field.type):
                schema = schema.set(i, field.with_type(_CODES))
        return schema

    def _sorted(self, pending: list[pa.Table]) -> pa.Table:
        rows = pa.concat_tables(pending).unify_dictionaries()
        pending.clear()
        keys = rows.select([name for name in self._sort_by if name in rows.column_names])
        keys = keys.append_column("", pa.array(np.arange(rows.num_rows)))
        order = sort_rows(keys, self._sort_by).column(keys.num_columns - 1)
        # One column after the other, so that there are never two of all.
        schema, columns = rows.schema, list(rows.columns)
        del rows, keys
        for i in range(len(columns)):
            columns[i] = columns[i].take(order)
        return pa.Table.from_arrays(columns, schema=schema)

    def _batches(self) -> Iterator[pa.Table]:
        for source in self.sources:
            if problem := check_segment(self._files, self._root, source):
                raise FormatError(f"the segment {source.path} is damaged: {problem}")
            with self._open(source) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                    yield pa.Table.from_batches([batch])


def _plain(schema: pa.Schema) -> pa.Schema:
    for i, field in enumerate(schema):
        if isinstance(field.type, pa.DictionaryType):
            schema = schema.set(i, field.with_type(field.type.value_type))
    return schema
