"""Writing an answer in the format that was asked for, to stdout or a file."""

from __future__ import annotations

import csv
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from probing.api.errors import ProbingError, UsageError
from probing.client.render import Field, render, terminal_width
from probing.client.rows import dump_json, dump_line, rows_of
from probing.client.settings import Settings
from probing.client.text import escape

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("write_bytes", "write_objects", "write_report", "write_rows", "write_table")


def write_rows(settings: Settings, table: pa.Table, fields: Sequence[Field] | None = None) -> None:
    """A table of rows. ``fields`` are the columns for people; all of them when left out."""
    if settings.format in ("parquet", "arrow"):
        _write_binary(settings, table)
    elif settings.format == "csv":
        _write_text(settings, _csv(settings, table.column_names, rows_of(table)))
    elif settings.format == "table":
        _write_text(settings, _people(settings, fields or _fields_of(table), rows_of(table)))
    else:
        _write_json(settings, rows_of(table))


def write_objects(
    settings: Settings, objects: list[dict[str, Any]] | dict[str, Any], people: str, flat: list[dict[str, Any]]
) -> None:
    """``objects`` as JSON, ``people`` as the table, and ``flat`` (one level, a row each) in the formats of rows."""
    if settings.format in ("json", "jsonl"):
        _write_json(settings, objects)
    elif settings.format == "table":
        _write_text(settings, people)
    elif settings.format == "csv":
        _write_text(settings, _csv(settings, list(flat[0]) if flat else [], flat))
    else:
        import pyarrow as pa

        _write_binary(settings, pa.Table.from_pylist(flat))


def write_table(settings: Settings, fields: Sequence[Field], rows: list[dict[str, Any]]) -> None:
    """Rows that are plain data already."""
    write_objects(settings, rows, _people(settings, fields, rows) if settings.format == "table" else "", rows)


def write_bytes(settings: Settings, data: bytes, kind: str, *, on_terminal: bool) -> None:
    """A whole file of the format ``kind``. Raises UsageError for a terminal unless ``on_terminal``."""
    if settings.output is not None:
        with _replacing(settings.output) as file:
            file.write(data)
        return
    if not on_terminal:
        _refuse_terminal(kind)
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def write_report(path: Path, report: dict[str, Any]) -> None:
    """``report`` as JSON in the file ``path``, which is there complete or not at all."""
    with _replacing(path) as file:
        file.write(dump_json(report).encode())


def _people(settings: Settings, fields: Sequence[Field], rows: list[dict[str, Any]]) -> str:
    to_terminal = settings.output is None
    width = terminal_width() if to_terminal else None
    text = render(fields, rows, width, bold=width is not None)
    return text if rows else text + "(no rows)\n"


def _fields_of(table: pa.Table) -> list[Field]:
    import pyarrow as pa

    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    names = list(rows_of(table.slice(0, 1))[0]) if table.num_rows else table.column_names
    kinds = [any(test(field.type) for test in numeric) for field in table.schema]
    return [Field(name, name, right=right) for name, right in zip(names, kinds, strict=True)]


def _csv(settings: Settings, names: Sequence[str], rows: list[dict[str, Any]]) -> str:
    keys = list(rows[0]) if rows else list(names)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    on_terminal = settings.output is None and sys.stdout.isatty()
    for row in rows:
        writer.writerow([_csv_value(row[key], on_terminal) for key in keys])
    return text.getvalue()


def _csv_value(value: Any, on_terminal: bool) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        value = "".join(dump_line([value])).rstrip("\n")
    return escape(value) if on_terminal and isinstance(value, str) else value


def _write_json(settings: Settings, objects: list[dict[str, Any]] | dict[str, Any]) -> None:
    if settings.format == "json":
        _write_text(settings, dump_json(objects))
        return
    _write_text(settings, "".join(dump_line([objects] if isinstance(objects, dict) else objects)))


def _write_text(settings: Settings, text: str) -> None:
    if settings.output is None:
        # A surrogate from a target's bytes must not end the program.
        sys.stdout.write(text.encode("utf-8", "backslashreplace").decode())
        sys.stdout.flush()
        return
    with _replacing(settings.output) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def _write_binary(settings: Settings, table: pa.Table) -> None:
    if settings.output is not None:
        with _replacing(settings.output) as file:
            _encode(settings.format, table, file)
        return
    _refuse_terminal(settings.format)
    buffer = io.BytesIO()
    _encode(settings.format, table, buffer)
    sys.stdout.buffer.write(buffer.getvalue())
    sys.stdout.flush()


def _refuse_terminal(kind: str) -> None:
    if sys.stdout.isatty():
        raise UsageError(f"{kind} is not for a terminal", hint="name a file with -o FILE, or redirect")


def _encode(kind: str, table: pa.Table, file: Any) -> None:
    if kind == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, file, compression="zstd")
        return
    import pyarrow as pa

    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside ``path`` that takes its place when all is written.

    What is no plain file is written directly; a link as well, since /dev/stdout may lead to a plain file.
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
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(name).unlink()
            raise
    except OSError as e:
        hint = "give a path that can be written"
        raise ProbingError(f"cannot write {path}: {e.strerror or e}", hint=hint) from None
