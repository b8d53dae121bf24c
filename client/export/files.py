"""The files of an export: a directory that other programs can read in place, or one file."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from probing.api.errors import PeerError, ProbingError, UsageError
from probing.client.render.output import replacing
from probing.client.render.writers import Writer, writer_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Counts", "Directory", "OneFile", "Place", "file_name")

# The maximum number of rows of a file. A day with more rows gets several files, which programs can read in parallel.
ROWS_A_FILE = 4_000_000
Where = tuple[str, str, str]


@dataclass(slots=True)
class Counts:
    """The numbers of rows, files and bytes that were written for one table of one node."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    paths: list[Path] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        self.rows += other.rows
        self.files += other.files
        self.bytes += other.bytes
        self.paths += other.paths


def file_name(node: str) -> str:
    """Returns a node's name as part of a file name; the name is not trusted."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", node).lstrip(".")[:100] or "node"


class Place(Protocol):
    """The target of an export. ``day`` writes the rows of one day; ``where`` is (table, date, node)."""

    def day(self, where: Where, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Counts: ...


class Directory:
    """Writes files ``TABLE/date=YYYY-MM-DD/NODE-N.KIND`` below ``root``."""

    def __init__(self, root: Path, kind: str, rows_a_file: int = ROWS_A_FILE) -> None:
        self._root = root
        self._kind = kind
        self._most = rows_a_file
        self._taken: set[Path] = set()
        self._lock = threading.Lock()

    def day(self, where: Where, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Counts:
        """Writes the rows of a day; a day without rows gets no file."""
        table, date, node = where
        counts = Counts()
        folder = self._root / table / f"date={date}"
        batch = next(batches, None)
        while batch is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = self._free(folder, file_name(node))
            with replacing(path) as file:
                batch = self._fill(file, schema, batch, batches, counts)
            counts.files += 1
            counts.bytes += path.stat().st_size
            counts.paths.append(path)
        return counts

    def _fill(
        self, file: IO[bytes], schema: pa.Schema, batch: pa.RecordBatch, more: Iterator[pa.RecordBatch], counts: Counts
    ) -> pa.RecordBatch | None:
        """Writes one file; returns the first batch of the next file, None after the last batch."""
        writer = writer_of(self._kind, file, schema, terminal=False)
        rows = 0
        following: pa.RecordBatch | None = batch
        while following is not None and (not rows or rows + following.num_rows <= self._most):
            writer.write(following)
            rows += following.num_rows
            following = next(more, None)
        writer.end()
        counts.rows += rows
        return following

    def _free(self, folder: Path, name: str) -> Path:
        with self._lock:
            number = 0
            while (path := folder / f"{name}-{number}.{self._kind}") in self._taken:
                number += 1
            self._taken.add(path)
        return path

    @staticmethod
    def forget(counts: Counts) -> None:
        """Deletes the files in ``counts``, because the export of their node has failed."""
        for path in counts.paths:
            with suppress(FileNotFoundError):
                path.unlink()

    @classmethod
    @contextmanager
    def replacing(cls, target: Path, kind: str) -> Iterator[tuple[Directory, Path]]:
        """Returns a context manager for a new directory, which is renamed to ``target`` at the end or deleted after an
        error. Raises UsageError if ``target`` exists and is not an empty directory.
        """
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{target} exists already", hint="name an empty or a new directory")
        try:
            aside = Path(tempfile.mkdtemp(dir=target.resolve().parent, prefix=f".{target.name}."))
            try:
                yield cls(aside, kind), aside
                mask = os.umask(0)
                os.umask(mask)
                aside.chmod(0o777 & ~mask)
                aside.rename(target)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        except OSError as e:
            hint = "give a path that can be written"
            raise ProbingError(f"cannot write {target}: {e.strerror or e}", hint=hint) from None


class OneFile:
    """One file with the rows of one table from all nodes."""

    def __init__(self, file: IO[bytes], kind: str) -> None:
        self._file = file
        self._kind = kind
        self._lock = threading.Lock()
        self._schema: pa.Schema | None = None
        self._of_none: pa.Schema | None = None
        self._writer: Writer | None = None

    def expect(self, schema: pa.Schema) -> None:
        """Sets the columns that the file gets if no node has a row. Without columns the file would be invalid."""
        with self._lock:
            self._of_none = schema

    def day(self, where: Where, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Counts:
        with self._lock:
            writer = self._begin(where[2], schema)
            counts = Counts()
            for batch in batches:
                writer.write(batch)
                counts.rows += batch.num_rows
            return counts

    def _begin(self, node: str, schema: pa.Schema) -> Writer:
        if self._writer is None:
            self._schema = schema
            self._writer = writer_of(self._kind, self._file, schema, terminal=False)
        if schema != self._schema:
            hint = "give a directory with -o, where each node has its own files"
            raise PeerError(f"{node} has other columns than the nodes before it", hint=hint)
        return self._writer

    def end(self) -> None:
        if self._writer is None and self._of_none is not None:
            self._writer = writer_of(self._kind, self._file, self._of_none, terminal=False)
        if self._writer is not None:
            self._writer.end()
