"""Writes rows in each format, batch by batch, so that memory is bounded by one batch."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from probing.api.text import age, encoded, escape, escape_json
from probing.client.render.rows import Record, Row, columns_of, dump_line, names_of, rows_of, storable, storable_schema
from probing.client.render.table import Field, Grid
from probing.client.zone import moment

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("FIRST_ROWS", "CsvWriter", "TableWriter", "Writer", "csv_text", "fields_of", "writer_of")

# The number of first rows whose values decide the widths of a table's columns; values of later rows may be wider.
FIRST_ROWS = 1000
_SLICE = 4096
_INTERVAL = re.compile(r"P(?:(-?\d+)D)?T(-?[\d.]+)S")
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20


class Writer(Protocol):
    """Writes batches of one schema; the file is complete after ``end``."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def end(self) -> None: ...


def writer_of(kind: str, sink: IO[bytes], schema: pa.Schema, *, width: int | None = None, terminal: bool) -> Writer:
    """Returns the writer of the format ``kind``. Only text formats use ``width`` (of the screen) and ``terminal``."""
    if kind == "parquet":
        return _Parquet(sink, schema)
    if kind == "arrow":
        return _Arrow(sink, schema)
    if kind == "csv":
        return CsvWriter(sink, schema, terminal=terminal)
    if kind == "json":
        return _Json(sink)
    if kind == "jsonl":
        return _JsonLines(sink)
    return TableWriter(sink, fields_of(schema), width)


def fields_of(schema: pa.Schema, *, flex: bool = False) -> list[Field]:
    """Returns a field for each column of ``schema``. ``flex``: text may be cut to fit the screen."""
    import pyarrow as pa

    shown = ((pa.types.is_timestamp, moment), (pa.types.is_interval, _length), (pa.types.is_duration, _length))
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    wide = (pa.types.is_string, pa.types.is_large_string, pa.types.is_nested, pa.types.is_binary)
    return [
        Field(
            name,
            name,
            next((show for test, show in shown if test(kind)), None),
            right=any(test(kind) for test in numeric),
            flex=flex and any(test(kind) for test in wide),
        )
        for name, kind in zip(names_of(schema.names), schema.types, strict=True)
    ]


def _length(interval: str | None) -> str:
    """Returns an interval of JSON (``PT8.557761S``) in the form of ``age``; an interval with months unchanged."""
    given = _INTERVAL.fullmatch(interval or "")
    if given is None:
        return interval or "-"
    days, seconds = (float(part or 0) for part in given.groups())
    return age((days * 86_400 + seconds) * 1e9)


def _slices(batch: pa.RecordBatch) -> list[pa.Table]:
    import pyarrow as pa

    table = pa.Table.from_batches([batch])
    return [table.slice(start, _SLICE) for start in range(0, table.num_rows, _SLICE)]


class TableWriter:
    """Writes a table of aligned columns."""

    def __init__(self, sink: IO[bytes], fields: Sequence[Field], width: int | None) -> None:
        self._sink = sink
        self._fields = fields
        self._width = width
        self._first: list[Row] = []
        self._grid: Grid | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        for table in _slices(batch):
            self.rows(rows_of(table))

    def rows(self, rows: list[Row]) -> None:
        if self._grid is None:
            self._first.extend(rows)
            if len(self._first) >= FIRST_ROWS:
                self._begin()
        else:
            self._sink.write(encoded(self._grid.lines(rows, cut=False)))

    def _begin(self) -> None:
        self._grid = Grid(self._fields, self._first, self._width)
        head = self._grid.head(bold=self._width is not None)
        self._sink.write(encoded(head + self._grid.lines(self._first)))
        self._first = []

    def end(self) -> None:
        if self._grid is None:
            empty = not self._first
            self._begin()
            if empty:
                self._sink.write(b"(no rows)\n")


class CsvWriter:
    """Writes CSV below a line of names; for a terminal the text is escaped."""

    def __init__(self, sink: IO[bytes], schema: pa.Schema, *, terminal: bool = False) -> None:
        self._sink = sink
        self._terminal = terminal
        self._names: list[str] | None = names_of(schema.names)

    def write(self, batch: pa.RecordBatch) -> None:
        self._begin()
        for table in _slices(batch):
            columns = [_csv_column(column, self._terminal) for column in columns_of(table)]
            self._sink.write(encoded(_csv_lines(zip(*columns, strict=True))))

    def _begin(self) -> None:
        # The line of names is written with the first rows; until then the terminal shows the progress.
        if self._names is not None:
            self._sink.write(encoded(csv_text(self._names, [], terminal=self._terminal)))
            self._names = None

    def end(self) -> None:
        self._begin()


def csv_text(names: Sequence[str], rows: Sequence[Record], *, terminal: bool) -> str:
    """Returns rows of JSON's types as CSV; a row may lack some of ``names``."""
    head = [escape(name) if terminal else name for name in names]
    return _csv_lines([head, *([_csv_value(row.get(name), terminal) for name in names] for row in rows)])


def _csv_lines(rows: Iterable[Sequence[Any]]) -> str:
    lines = list(rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    if "\r" in text.getvalue():
        # Older Pythons do not quote a lone carriage return, which readers take for the end of a line.
        text = io.StringIO()
        csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(lines)
    return text.getvalue()


def _csv_column(values: list[Any], terminal: bool) -> list[Any]:
    kinds = set(map(type, values))
    if kinds <= {int, float, type(None)} or (kinds <= {int, float, str, type(None)} and not terminal):
        return values
    return [_csv_value(value, terminal) for value in values]


def _csv_value(value: Any, terminal: bool) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        value = "".join(dump_line([value])).rstrip("\n")
    return escape(value) if terminal and isinstance(value, str) else value


class _Json:
    """Writes one list of objects, indented as by ``dump_json``."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._some = False

    def write(self, batch: pa.RecordBatch) -> None:
        for table in _slices(batch):
            text = json.dumps(rows_of(table), ensure_ascii=False, indent=2)
            # The brackets of the batch's list are left out.
            self._sink.write((b",\n" if self._some else b"[\n") + encoded(escape_json(text[2:-2])))
            self._some = True

    def end(self) -> None:
        self._sink.write(b"\n]\n" if self._some else b"[]\n")


class _JsonLines:
    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink

    def write(self, batch: pa.RecordBatch) -> None:
        for table in _slices(batch):
            self._sink.write(encoded("".join(dump_line(rows_of(table)))))

    def end(self) -> None:
        pass


class _Arrow:
    """Writes an Arrow IPC stream."""

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        import pyarrow as pa

        self._writer = pa.ipc.new_stream(sink, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def end(self) -> None:
        self._writer.close()


class _Sink(io.RawIOBase):
    """A file that can be taken from its writer: once ``file`` is None, everything that is written is discarded."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file: IO[bytes] | None = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data) if self.file is None else self.file.write(data)


class _Parquet:
    """Writes Parquet. Collects batches for a row group, because small groups are slow to read. Types that Parquet lacks
    become text.
    """

    def __init__(self, sink: IO[bytes], schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._sink = _Sink(sink)
        self._writer = pq.ParquetWriter(cast("IO[bytes]", self._sink), storable_schema(schema), compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def __del__(self) -> None:
        # The destructor of a ParquetWriter that was not closed would end the file as if it were complete, or fail
        # because the file is closed.
        self._sink.file = None

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(storable(pa.Table.from_batches(self._batches)), row_group_size=self._rows)
        self._batches, self._rows, self._bytes = [], 0, 0

    def end(self) -> None:
        self._flush()
        self._writer.close()
