"""Finds the files to import: those that a state directory's manifest and log name, or plain Parquet files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from probing.api.errors import FormatError, ProbingError, UsageError
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.files import SystemFiles, open_file
from probing.daemon.store.log.parts import WAL_DIR, part_number, part_path
from probing.daemon.store.manifest import MANIFEST, LoadedManifest, Segment, load_manifest

__all__ = ("ImportProblem", "Unit", "find_units")

MAX_FILES = 1_000_000
_FILES = SystemFiles()


@dataclass(frozen=True, slots=True)
class ImportProblem:
    """Why ``path`` was not imported, or not all of it."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A file to import: a log part if ``log``, else a Parquet file.

    ``parts`` are the log parts of ``node`` that its rows are from, ``segment`` is its entry in the manifest. Records of
    a log part from the sequence number ``void_from`` on are void.
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
    found = 0
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted(files):
            if name.endswith(".parquet"):
                found += 1
                if found > MAX_FILES:
                    raise UsageError(f"{source} has more than {MAX_FILES} files", hint="import it in parts")
                yield Unit(Path(folder, name))


def _of_state(root: Path, decoder: Decoder, problems: list[ImportProblem]) -> list[Unit]:
    manifest = load_manifest(_FILES, root)
    node = _node(root)
    if manifest.bad_lines or not manifest.found:
        what = f"{manifest.bad_lines} lines are damaged" if manifest.found else "it is missing"
        problems.append(ImportProblem(str(root / MANIFEST), f"{what}: segments that only it names are not imported"))
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
