"""The journal of imported files: ``imports.jsonl`` in the state directory, to which lines are only appended.

A file gets a line before its first rows, and a second line once all its rows are synced. Each log record with rows of
the file also has the progress of the import, as the position of a ring named ``import``: the file's number, how many of
its pieces are in the log, and how many slices of the next piece are in the log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from probing.api.errors import FormatError, StoreError
from probing.api.typed import typed_json
from probing.daemon.store.files import FILE_MODE, read_file
from probing.daemon.store.format import Positions

__all__ = ("JOURNAL", "RING", "SLICES", "Entry", "Journal", "Span")

JOURNAL = "imports.jsonl"
RING = "import"
# The key of the number of slices, in the field ``rows`` of the position.
SLICES = "slices"
MAX_BYTES = 1 << 28


class Span(NamedTuple):
    """The rows of one table in one file, with their first and last ``ts``, UTC ns."""

    rows: int
    ts_min: int
    ts_max: int


@dataclass(slots=True)
class Entry:
    """An imported file. ``pieces``: how many of its pieces are in the log. ``slices``: how many slices of the next
    piece are in the log.

    ``sha``: the SHA-256 of the file. For a log part with void records, ``<`` and the first void sequence number follow.
    ``parts``: the first and last log part of ``node`` from which its rows come, if known.
    """

    number: int
    sha: str
    node: str = ""
    parts: tuple[int, int] | None = None
    tables: dict[str, Span] = field(default_factory=dict)
    pieces: int = 0
    slices: int = 0
    done: bool = False


class _Line(msgspec.Struct):
    """A line of the journal: a new entry if it has ``sha``, otherwise the progress of the entry ``number``."""

    number: int
    sha: str = ""
    node: str = ""
    parts: tuple[int, int] | None = None
    tables: dict[str, Span] = {}
    pieces: int | None = None
    slices: int | None = None
    done: bool = False


class Journal:
    """The journal. Not thread-safe. Raises StoreError when it cannot be written, FormatError when it is damaged."""

    def __init__(self, root: Path, positions: Positions) -> None:
        """Opens the journal. ``positions``: the store's ring positions, which include the progress of the
        newest file.
        """
        self._path = root / JOURNAL
        self._entries: dict[str, Entry] = {}
        self._newest = 0
        whole = self._load()
        reached = positions.get(RING, {})
        self._newest = max(self._newest, int(reached.get("map_id", 0)))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, FILE_MODE)
            os.ftruncate(self._fd, whole)
        except OSError as e:
            raise self._unwritable(e) from e
        for entry in self._entries.values():
            # The store keeps the position of the newest file only. The import of the next file overwrites it, so the
            # progress of an unfinished newest file is copied to the journal.
            if entry.number == reached.get("map_id") and not entry.done:
                entry.pieces = int(reached["position"])
                entry.slices = reached.get("rows", {}).get(SLICES, 0)
                self._write({"number": entry.number, "pieces": entry.pieces, "slices": entry.slices})

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def find(self, sha: str) -> Entry | None:
        """Returns the entry of the file with this SHA-256."""
        return self._entries.get(sha)

    def begin(self, sha: str, node: str, parts: tuple[int, int] | None, tables: dict[str, Span]) -> Entry:
        """Adds the entry of a file before its rows are appended. An interrupted file gets a new number and keeps its
        pieces and slices.
        """
        older = self._entries.get(sha)
        self._newest += 1
        entry = Entry(self._newest, sha, node, parts, tables)
        if older is not None:
            entry.pieces, entry.slices = older.pieces, older.slices
        line = {"number": entry.number, "sha": sha, "node": node, "tables": tables}
        self._write({**line, "parts": parts, "pieces": entry.pieces, "slices": entry.slices})
        self._entries[sha] = entry
        return entry

    def finish(self, entry: Entry) -> None:
        """Marks a file as done, after all its rows were synced to disk."""
        self._write({"number": entry.number, "done": True})
        entry.done = True

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, fields: Mapping[str, object]) -> None:
        data = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as e:
            raise self._unwritable(e) from e

    def _unwritable(self, e: OSError) -> StoreError:
        hint = "check the disk and the rights of the file"
        return StoreError(f"{self._path} cannot be written: {e.strerror or e}", hint=hint)

    def _load(self) -> int:
        """Reads the journal, and returns the size of its complete lines in bytes. Ignores an unfinished last line."""
        try:
            data = read_file(self._path, MAX_BYTES)
        except FileNotFoundError:
            return 0
        except OSError as e:
            raise StoreError(f"{self._path} cannot be read: {e.strerror or e}") from e
        whole = data.rfind(b"\n") + 1
        try:
            self._apply(typed_json(_Line, line) for line in data[:whole].splitlines())
        except (ValueError, KeyError) as e:
            hint = "the file prevents double imports: if you delete it, import only files that were never imported"
            raise FormatError(f"{self._path} is damaged", hint=hint) from e
        return whole

    def _apply(self, lines: Iterable[_Line]) -> None:
        by_number: dict[int, Entry] = {}
        for line in lines:
            if line.sha:
                entry = Entry(line.number, line.sha, line.node, line.parts, line.tables)
                by_number[line.number] = self._entries[line.sha] = entry
                self._newest = max(self._newest, line.number)
            entry = by_number[line.number]
            entry.pieces = entry.pieces if line.pieces is None else line.pieces
            entry.slices = entry.slices if line.slices is None else line.slices
            entry.done = entry.done or line.done
