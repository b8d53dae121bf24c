"""Writes an answer in the format of the settings, to stdout or a file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from probing.api.errors import ProbingError, UsageError
from probing.api.text import encoded
from probing.client.absence import require_all
from probing.client.render.rows import Record, dump_json, dump_line, rows_of
from probing.client.render.table import Field, render, terminal_width
from probing.client.render.writers import csv_text, fields_of, writer_of
from probing.client.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = (
    "replacing",
    "write_bytes",
    "write_objects",
    "write_report",
    "write_rows",
    "write_stream",
    "write_table",
)
_BINARY = ("parquet", "arrow")


def write_stream(settings: Settings, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Writes rows as they come and returns their number. A file is written completely or not at all."""
    rows = 0
    with _sink(settings) as sink:
        on_terminal = settings.output is None and sys.stdout.isatty()
        width = terminal_width() if on_terminal else None
        writer = writer_of(settings.format, sink, schema, width=width, terminal=on_terminal)
        for batch in batches:
            writer.write(batch)
            rows += batch.num_rows
            if settings.output is None:
                sink.flush()
        if not rows:
            require_all()
        writer.end()
    return rows


def write_rows(settings: Settings, table: pa.Table, fields: Sequence[Field] | None = None) -> None:
    """Writes an Arrow table. The format ``table`` shows only the columns ``fields``; None: all columns. Raises
    PartialAnswer if the table is empty and a node did not answer.
    """
    if settings.format == "table":
        if not table.num_rows:
            require_all()
        _write_text(settings, _table_text(settings, fields or fields_of(table.schema), rows_of(table)))
    else:
        write_stream(settings, table.schema, table.to_batches())


def write_objects(settings: Settings, objects: Sequence[Record] | Record, text: str, flat: Sequence[Record]) -> None:
    """Writes one of three forms of an answer: ``objects`` in the formats ``json`` and ``jsonl``, ``text`` in the format
    ``table``, the rows ``flat`` in all other formats.

    Raises PartialAnswer if the answer is empty and a node did not answer.
    """
    if not flat and not any(objects.values() if isinstance(objects, Mapping) else objects):
        require_all()
    if settings.format in ("json", "jsonl"):
        _write_json(settings, objects)
    elif settings.format == "table":
        _write_text(settings, text)
    elif settings.format == "csv":
        on_terminal = settings.output is None and sys.stdout.isatty()
        _write_text(settings, csv_text(_names(flat), flat, terminal=on_terminal))
    else:
        import pyarrow as pa

        # Arrow would take the columns of the first row, and leave out all other columns.
        names = _names(flat)
        write_rows(settings, pa.Table.from_pylist([{name: row.get(name) for name in names} for row in flat]))


def _names(rows: Sequence[Record]) -> list[str]:
    """Returns the names of all columns of ``rows``. A row may lack columns: for example, the row of a GPU without a
    reading.
    """
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(settings: Settings, fields: Sequence[Field], rows: Sequence[Record]) -> None:
    """Writes rows whose values have JSON's types."""
    write_objects(settings, rows, _table_text(settings, fields, rows) if settings.format == "table" else "", rows)


def write_bytes(settings: Settings, data: bytes, kind: str, *, on_terminal: bool) -> None:
    """Writes ``data``, a whole file of the format ``kind``. Raises UsageError if stdout is a terminal, unless
    ``on_terminal``.
    """
    if settings.output is not None:
        with replacing(settings.output) as file:
            file.write(data)
        return
    if not on_terminal:
        _refuse_terminal(kind)
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def write_report(path: Path, report: Record) -> None:
    """Writes ``report`` as JSON to the file ``path``, completely or not at all."""
    with replacing(path) as file:
        file.write(dump_json(report).encode())


def _table_text(settings: Settings, fields: Sequence[Field], rows: Sequence[Record]) -> str:
    to_terminal = settings.output is None
    width = terminal_width() if to_terminal else None
    text = render(fields, rows, width, bold=width is not None)
    return text if rows else text + "(no rows)\n"


def _write_json(settings: Settings, objects: Sequence[Record] | Record) -> None:
    if settings.format == "json":
        _write_text(settings, dump_json(objects))
        return
    _write_text(settings, "".join(dump_line(objects if isinstance(objects, Sequence) else [objects])))


def _write_text(settings: Settings, text: str) -> None:
    if settings.output is None:
        sys.stdout.write(encoded(text).decode())
        sys.stdout.flush()
        return
    with replacing(settings.output) as file:
        file.write(encoded(text))


@contextmanager
def _sink(settings: Settings) -> Iterator[IO[bytes]]:
    if settings.output is not None:
        with replacing(settings.output) as file:
            yield file
        return
    if settings.format in _BINARY:
        _refuse_terminal(settings.format)
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.flush()


def _refuse_terminal(kind: str) -> None:
    if sys.stdout.isatty():
        raise UsageError(f"{kind} is not for a terminal", hint="name a file with -o FILE, or redirect")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Returns a context manager for a file that replaces ``path`` if the context ends without an error. The mode of the
    file is ``mode`` less the umask.

    A device or pipe is written directly. A symbolic link is also written directly, because /dev/stdout may lead to a
    plain file.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            with path.open("wb") as file:
                yield file
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(mode & ~mask)
            Path(name).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(name).unlink()
            raise
    except OSError as e:
        hint = "give a path that can be written"
        raise ProbingError(f"cannot write {path}: {e.strerror or e}", hint=hint) from None
