"""``probingd import``: imports rows of other state directories and of Parquet files into this state directory, each row
once.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError, StoreError, UsageError
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.directory_lock import kept_unused
from probing.daemon.store.files import open_file
from probing.daemon.store.format import RingPosition
from probing.daemon.store.importing.journal import RING, SLICES, Entry, Journal, Span
from probing.daemon.store.importing.sources import ImportProblem, Unit, check_columns, find_units, physical_rows
from probing.daemon.store.importing.target import Target, acting_as, append_losses, check_space, open_target
from probing.daemon.store.manifest import Segment
from probing.daemon.store.store import Store

__all__ = (
    "Imported",
    "import_sources",
)


def _is_imported(unit: Unit, name: str, span: Span, older: Sequence[Entry]) -> bool:
    """Returns whether the rows of table ``name`` in ``unit`` were imported from other files.

    When a state directory is copied twice, log parts may be sealed and segments merged in between, so the second copy
    can have the same rows in other files. Raises FormatError when only some of the rows may have been imported.
    """
    if unit.parts is None or not unit.node:
        return False
    first, last = unit.parts
    known = [
        (entry.parts, entry.tables[name])
        for entry in older
        if entry.parts
        and entry.node == unit.node
        and name in entry.tables
        and entry.parts[0] <= last
        and first <= entry.parts[1]
        and entry.tables[name].ts_min <= span.ts_max
        and span.ts_min <= entry.tables[name].ts_max
    ]
    if not known:
        return False
    if any(
        parts[0] <= first and last <= parts[1] and old.ts_min <= span.ts_min and span.ts_max <= old.ts_max
        for parts, old in known
    ):
        return True
    inside = all(
        first <= parts[0] and parts[1] <= last and span.ts_min <= old.ts_min and old.ts_max <= span.ts_max
        for parts, old in known
    )
    if inside and sum(old.rows for _, old in known) == span.rows:
        return True
    raise FormatError(
        f"some of its rows were imported earlier from other files of {unit.node}, so none of its rows is imported now"
    )


# The number of rows in one record. This number must never change: an interrupted import continues at a multiple of it.
PIECE_ROWS = 1 << 16
MAX_PIECE_BYTES = 1 << 27
# A piece of more than MAX_PIECE_BYTES, as stacks can have, is split into records of this many rows. This number must
# not change, either.
SLICE_ROWS = 1 << 12
_READ_BYTES = 1 << 20
_DAY_NS = 86_400_000_000_000


@dataclass(slots=True)
class Imported:
    """The result of an import. ``files``: the number of files with new rows; ``rows``: the number of imported rows, by
    table; ``already``: the number of files whose rows were all imported before.
    """

    files: int = 0
    already: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[ImportProblem] = field(default_factory=list)


def import_sources(
    target: Target,
    sources: Sequence[Path],
    decoder: Decoder,
    *,
    table: str = "",
    now_ns: int,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Imported:
    """Imports each file of ``sources`` once, whatever its name. After a kill the next call imports the rest.

    ``table`` is the table of Parquet files without a table name. ``progress`` is called with the imported bytes and the
    total bytes. Damaged files are listed in ``problems``. Raises StateLocked while a daemon uses the directory or a
    source, StoreFull, StoreError and UsageError.
    """
    if not target.root.is_dir():
        hint = "start the daemon once, or name its directory: --state-dir"
        raise StoreError(f"there is no state directory {target.root}", hint=hint)
    if table and (table not in target.tables or target.tables[table].live):
        raise UsageError(f"there is no stored table {table[:80]}", hint="`probingctl tables` lists the tables")
    done = Imported()
    with ExitStack() as stack:
        groups = []
        for source in sources:
            if source.is_dir() and source.samefile(target.root):
                raise UsageError(f"{source} is the directory to import into", hint="name another directory")
            stack.enter_context(kept_unused(source))
            groups.append(find_units(source, decoder, done.problems))
        with acting_as(target.root):
            store = stack.enter_context(open_target(target))
            journal = Journal(target.root, store.positions)
        stack.callback(journal.close)
        sizes = {unit.path: _size(unit.path) for group in groups for unit in group}
        check_space(target, store, sum(sizes.values()))
        work = _Import(target, store, journal, decoder, table, now_ns, done)
        seen = 0
        for group in groups:
            older = [entry for entry in journal.entries if entry.done]
            for unit in group:
                progress(seen, sum(sizes.values()))
                work.take(unit, older)
                seen += sizes[unit.path]
        progress(seen, seen)
        with acting_as(target.root):
            store.seal(now=True)
            append_losses(store, target.node, now_ns)
    return done


class _Import:
    def __init__(
        self, target: Target, store: Store, journal: Journal, decoder: Decoder, table: str, now_ns: int, done: Imported
    ) -> None:
        self._target = target
        self._store = store
        self._journal = journal
        self._decoder = decoder
        self._table = table
        self._now_ns = now_ns
        self._done = done

    def take(self, unit: Unit, older: Sequence[Entry]) -> None:
        try:
            fd = open_file(unit.path)
        except (OSError, FormatError) as e:
            self._problem(unit, f"it cannot be read: {e}")
            return
        try:
            self._take(unit, fd, older)
        except FormatError as e:
            self._problem(unit, e.message)
        finally:
            os.close(fd)

    def _take(self, unit: Unit, fd: int, older: Sequence[Entry]) -> None:
        sha, crc = _digest(fd)
        if unit.segment is None or crc == unit.segment.crc:
            self._take_good(unit, fd, sha, older)
            return
        good = self._salvaged(unit, unit.segment, fd)
        try:
            self._take_good(unit, good, sha, older)
        finally:
            os.close(good)

    def _salvaged(self, unit: Unit, segment: Segment, fd: int) -> int:
        try:
            good, lost = self._decoder.salvage(fd, segment)
        except FormatError as e:
            raise FormatError(f"its checksum is wrong: {e.message}") from e
        for group in lost:
            damage = f"row group {group.group} with {group.rows} rows is damaged"
            self._problem(unit, f"{damage}: the other row groups are imported")
        return good

    def _take_good(self, unit: Unit, fd: int, sha: str, older: Sequence[Entry]) -> None:
        if unit.void_from is not None:
            # The part after this part decides which records are void. The same file can therefore yield different rows
            # when a different part follows it, so the key includes ``void_from``.
            sha = f"{sha}<{unit.void_from}"
        known = self._journal.find(sha)
        if known is not None and known.done:
            self._done.already += 1
            return
        spans = self._spans(unit, fd)
        wanted = spans if known else {n: s for n, s in spans.items() if not _is_imported(unit, n, s, older)}
        wanted = {name: span for name, span in wanted.items() if span.rows}
        if wanted:
            self._check_times(wanted)
            self._bring(unit, fd, sha, wanted)
        elif spans:
            self._done.already += 1

    def _spans(self, unit: Unit, fd: int) -> dict[str, Span]:
        """Returns, for each table, the number of its rows in the file and their first and last ``ts``. Decodes the
        whole file first: no row of a file that cannot be decoded is imported."""
        if unit.log:
            log = self._decoder.log(fd, unit.void_from)
            for problem in log.problems:
                self._problem(unit, f"{problem}; the rows before the damage are imported")
            return {name: Span(count, *log.times[name]) for name, count in log.rows.items() if self._known(unit, name)}
        segment = self._decoder.segment(fd)
        name = self._name(unit, segment.table)
        check_columns(self._target.tables[name], segment.columns)
        return {name: Span(segment.rows, segment.ts_min, segment.ts_max)}

    def _known(self, unit: Unit, name: str) -> bool:
        table = self._target.tables.get(name)
        if table is not None and not table.live:
            return True
        self._problem(unit, f"this node has no stored table {name[:80]!r}")
        return False

    def _problem(self, unit: Unit, problem: str) -> None:
        self._done.problems.append(ImportProblem(str(unit.path), problem))

    def _name(self, unit: Unit, named: str) -> str:
        """Returns the table of a Parquet file, from its metadata, its path or ``--table``, in this order."""
        tables = self._target.tables
        around = (unit.path.stem, *(parent.name for parent in list(unit.path.parents)[:3]))
        name = named or next((name for name in around if name in tables), self._table)
        if not name:
            raise FormatError("it does not name the table of its rows: pass --table")
        if name not in tables:
            raise FormatError(f"this node has no table {name[:80]!r}")
        return name

    def _check_times(self, spans: Mapping[str, Span]) -> None:
        """Raises FormatError if retention would drop all rows at once, or if rows are more than a day in the future."""
        if max(span.ts_max for span in spans.values()) > self._now_ns + _DAY_NS:
            raise FormatError("it has rows with times more than a day from now")
        if all(span.ts_max < self._now_ns - int(self._kept_s(name) * 1e9) for name, span in spans.items()):
            days = max(map(self._kept_s, spans)) / 86_400
            rows = sum(span.rows for span in spans.values())
            raise FormatError(f"all {rows} rows are older than {days:g} days: raise store.max_age_days first")

    def _kept_s(self, name: str) -> float:
        limits = self._target.limits
        own = limits.tables.get(name)
        return min(limits.max_age_s, own.max_age_s if own and own.max_age_s is not None else limits.max_age_s)

    def _bring(self, unit: Unit, fd: int, sha: str, wanted: dict[str, Span]) -> None:
        with acting_as(self._target.root):
            entry = self._journal.begin(sha, unit.node, unit.parts, wanted)
        if unit.log and not entry.pieces:
            # All tables of a log part are imported in one record.
            pieces = self._decoder.log_rows(fd, unit.void_from)
            self._append(entry, {name: self._fit(name, rows) for name, rows in pieces if name in wanted})
        elif not unit.log:
            (name,) = wanted
            for rows in self._decoder.segment_rows(fd, PIECE_ROWS, entry.pieces):
                piece = self._fit(name, rows)
                slices = _slices(piece) if entry.slices or piece.nbytes > MAX_PIECE_BYTES else [piece]
                for number in range(entry.slices, len(slices)):
                    self._append(entry, {name: slices[number]}, is_last=number == len(slices) - 1)
        with acting_as(self._target.root):
            self._store.sync()
            self._journal.finish(entry)
        self._done.files += 1

    def _fit(self, name: str, rows: pa.Table) -> pa.Table:
        return physical_rows(self._target.tables[name], rows)

    def _append(self, entry: Entry, rows: dict[str, pa.Table], *, is_last: bool = True) -> None:
        """Appends a piece, or a slice of a piece. ``is_last``: the slice completes the piece."""
        if sum(piece.nbytes for piece in rows.values()) > MAX_PIECE_BYTES:
            raise FormatError(f"the rows of one record would have more than {MAX_PIECE_BYTES} bytes")
        batches = {name: piece.combine_chunks().to_batches() for name, piece in rows.items()}
        position: RingPosition = {"boot_id": "", "map_id": entry.number, "position": entry.pieces + is_last}
        if not is_last:
            position["rows"] = {SLICES: entry.slices + 1}
        with acting_as(self._target.root):
            self._store.append(batches, {RING: position})
            self._store.seal()
        entry.pieces += is_last
        entry.slices = 0 if is_last else entry.slices + 1
        for name, piece in rows.items():
            self._done.rows[name] = self._done.rows.get(name, 0) + piece.num_rows


def _slices(piece: pa.Table) -> list[pa.Table]:
    return [piece.slice(start, SLICE_ROWS) for start in range(0, piece.num_rows, SLICE_ROWS)]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _digest(fd: int) -> tuple[str, int]:
    """Returns SHA-256 and CRC32 of an open file."""
    digest, crc, at = hashlib.sha256(), 0, 0
    while data := os.pread(fd, _READ_BYTES, at):
        digest.update(data)
        crc = zlib.crc32(data, crc)
        at += len(data)
    return digest.hexdigest(), crc
