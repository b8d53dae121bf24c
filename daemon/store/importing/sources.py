"""Lists the files to import, from a state directory or a folder of Parquet files, and converts their rows to the
physical schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError, ProbingError, UsageError
from probing.api.tables import Table
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.files import SystemFiles, open_file
from probing.daemon.store.log.parts import WAL_DIR, part_number, part_path
from probing.daemon.store.log.streams import conform
from probing.daemon.store.manifest import MANIFEST, LoadedManifest, Segment, load_manifest

__all__ = (
    "ImportProblem",
    "Unit",
    "check_columns",
    "find_units",
    "physical_rows",
)

MAX_FILES = 1_000_000
_FILES = SystemFiles()


@dataclass(frozen=True, slots=True)
class ImportProblem:
    """The reason why ``path`` was not imported completely."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A file to import: a log part if ``log``, else a Parquet file.

    ``parts``: the first and last log part of ``node`` from which its rows come. ``segment``: its entry in the manifest.
    Records of a log part from the sequence number ``void_from`` on are void.
    """

    path: Path
    log: bool = False
    node: str = ""
    parts: tuple[int, int] | None = None
    void_from: int | None = None
    segment: Segment | None = None


def find_units(source: Path, decoder: Decoder, problems: list[ImportProblem]) -> list[Unit]:
    """Returns the files of ``source``: a state directory, a directory with Parquet files, or one Parquet file.

    Adds files that cannot be imported to ``problems``. Raises UsageError when there is no such source.
    """
    try:
        if source.is_dir():
            state = (source / MANIFEST).exists() or (source / WAL_DIR).is_dir()
            return _of_state(source, decoder, problems) if state else list(_parquet_files(source))
        os.close(open_file(source))
    except FormatError as e:
        raise UsageError(f"{source}: {e.message}", hint="name state directories or Parquet files") from e
    except OSError as e:
        raise UsageError(f"{source}: {e.strerror or e}", hint="name state directories or Parquet files") from e
    return [Unit(source)]


def _parquet_files(source: Path) -> Iterator[Unit]:
    count = 0
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted(files):
            if name.endswith(".parquet"):
                count += 1
                if count > MAX_FILES:
                    raise UsageError(f"{source} has more than {MAX_FILES} files", hint="import it in parts")
                yield Unit(Path(folder, name))


def _of_state(root: Path, decoder: Decoder, problems: list[ImportProblem]) -> list[Unit]:
    manifest = load_manifest(_FILES, root)
    node = _node(root)
    if manifest.bad_lines or not manifest.found:
        damaged = f"{manifest.bad_lines} lines are damaged: segments that only these lines name are not imported"
        what = damaged if manifest.found else "it is missing: no segment is imported"
        problems.append(ImportProblem(str(root / MANIFEST), what))
    units = [Unit(root / s.path, node=node, parts=s.parts, segment=s) for s in manifest.segments.values()]
    return [*units, *_log_parts(root, manifest, node, decoder, problems)]


def _node(root: Path) -> str:
    try:
        first = _FILES.read(root / MANIFEST, 1 << 16).split(b"\n", 1)[0]
        return str(json.loads(first.partition(b" ")[2])["node"])[:256]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _log_parts(
    root: Path, manifest: LoadedManifest, node: str, decoder: Decoder, problems: list[ImportProblem]
) -> Iterable[Unit]:
    numbers = [n for n in map(part_number, _FILES.listdir(root / WAL_DIR)) if n and n > manifest.sealed_to]
    void_from: int | None = None
    units = []
    for number in sorted(numbers, reverse=True):
        path = part_path(root, number)
        try:
            fd = open_file(path)
            try:
                header = decoder.log_header(fd)
            finally:
                os.close(fd)
            if header.number != number:
                raise FormatError(f"it has the header of log part {header.number}")
        except (ProbingError, OSError) as e:
            problems.append(ImportProblem(str(path), str(e)))
            continue
        units.append(Unit(path, True, node or header.node, (number, number), void_from))
        void_from = header.first_sequence
    return reversed(units)


# The shown columns from which stored columns can be computed, by table.
_NEEDED = {"comm.ops": ("t_launch", "t_start", "t_done_lo", "t_done_hi", "timing_source")}
_ALWAYS = ("node", "ts")


def check_columns(table: Table, names: Sequence[str]) -> None:
    """Raises FormatError when a file with the columns ``names`` cannot have rows of ``table``."""
    given = set(names)
    if table.live:
        raise FormatError(f"{table.name} is made for each query and never stored")
    if len(given) != len(names):
        raise FormatError("two of its columns have the same name")
    if missing := [name for name in _ALWAYS if name in table.physical.names and name not in given]:
        raise FormatError(f"it has no column {missing[0]}, which every row of {table.name} needs")
    if unknown := sorted(given - set(table.physical.names) - set(table.logical.names)):
        raise FormatError(f"{table.name} has no column {unknown[0][:80]}")
    if not _is_shown(table, given):
        return
    hidden = set(table.physical.names) - set(table.logical.names)
    if hidden & given:
        raise FormatError("it mixes columns that only the store has with columns that only query results have")
    if hidden and table.name not in _NEEDED:
        raise FormatError(
            f"a query result of {table.name} lacks columns that the store needs: {', '.join(sorted(hidden))}"
        )
    if lacking := [name for name in _NEEDED.get(table.name, ()) if name not in given]:
        raise FormatError(f"it has no column {lacking[0]}, from which a stored column is computed")


def physical_rows(table: Table, rows: pa.Table) -> pa.Table:
    """Returns ``rows``, whose columns passed ``check_columns``, in the physical schema. Raises FormatError."""
    try:
        if _is_shown(table, set(rows.column_names)) and table.name in _NEEDED:
            rows = _stored_times(rows)
        return conform(rows, table.physical)
    except (pa.ArrowException, OverflowError) as e:
        raise FormatError(f"its columns have other types than {table.name}: {str(e).splitlines()[0]}") from e


def _is_shown(table: Table, names: set[str]) -> bool:
    computed = {column.name for column in table.columns if column.sql is not None}
    hidden = set(table.physical.names) - set(table.logical.names)
    # A file without computed columns is a query result, too, if its table has hidden columns and the file has none of
    # them.
    return bool(computed & names) or (bool(hidden) and not hidden & names)


def _stored_times(rows: pa.Table) -> pa.Table:
    """Returns ``rows`` of comm.ops with the stored columns of times, in ns after the call."""
    import pyarrow.compute as pc

    subtract: Callable[..., Any] = pc.subtract_checked
    called: Any = _ns(rows.column("ts"))
    stored = {
        name: subtract(_ns(rows.column(shown)), called)
        for name, shown in (
            ("launch_ns_after", "t_launch"),
            ("start_ns_after", "t_start"),
            ("done_lo_ns", "t_done_lo"),
            ("done_hi_ns", "t_done_hi"),
        )
    }
    for name, column in stored.items():
        rows = rows.append_column(name, column)
    return rows


def _ns(column: Any) -> Any:
    return column.cast(pa.timestamp("ns")).cast(pa.int64())
