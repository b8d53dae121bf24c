"""Rows of other state directories and of Parquet files, into this one: ``probingd import``."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError, StateLocked, StoreError, StoreFull, UsageError
from probing.api.tables import Table
from probing.daemon.arrow import batch_of
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.files import open_file
from probing.daemon.store.importing.journal import RING, Entry, Journal, Span
from probing.daemon.store.importing.rows import check_columns, physical_rows
from probing.daemon.store.importing.sources import Problem, Unit, find_units, unused
from probing.daemon.store.limits import StoreLimits
from probing.daemon.store.manifest import Segment
from probing.daemon.store.store import Store

__all__ = ("Imported", "Target", "import_sources")

# Rows of one record. What was interrupted goes on at a multiple of it, so it stays as it is.
PIECE_ROWS = 1 << 16
MAX_PIECE_BYTES = 1 << 27
_READ_BYTES = 1 << 20
_DAY_NS = 86_400_000_000_000


@dataclass(frozen=True)
class Target:
    """The state directory that rows go into. ``tables`` are those that it knows, ``node`` is its own name."""

    root: Path
    node: str
    limits: StoreLimits
    tables: Mapping[str, Table]


@dataclass(slots=True)
class Imported:
    """``rows`` by table; ``files`` had new rows, ``already`` counts those that were here before."""

    files: int = 0
    already: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def import_sources(
    target: Target,
    sources: Sequence[Path],
    decoder: Decoder,
    *,
    table: str = "",
    now_ns: int,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Imported:
    """Each file once, whatever its name: the same again adds nothing, and after a kill the next call goes on.

    ``table`` is what Parquet files hold that do not say it. ``progress`` is told bytes. Raises StateLocked while a
    daemon uses the directory or a source, StoreFull, StoreError and UsageError; damaged files are among ``problems``.
    """
    if not target.root.is_dir():
        raise StoreError(f"there is no state directory {target.root}", hint="start the daemon once, or see --state-dir")
    if table and (table not in target.tables or target.tables[table].live):
        raise UsageError(f"there is no stored table {table[:80]}", hint="`probingctl tables` lists the tables")
    done = Imported()
    with ExitStack() as stack:
        groups = []
        for source in sources:
            if source.is_dir() and source.samefile(target.root):
                raise UsageError(f"{source} is the directory to import into", hint="name another one")
            stack.enter_context(unused(source))
            groups.append(find_units(source, decoder, done.problems))
        with _acting_as(target.root):
            store = stack.enter_context(_opened(target))
            journal = Journal(target.root, store.positions)
        stack.callback(journal.close)
        sizes = {unit.path: _size(unit.path) for group in groups for unit in group}
        _check_space(target, store, sum(sizes.values()))
        work = _Import(target, store, journal, decoder, table, now_ns, done)
        seen = 0
        for group in groups:
            older = [entry for entry in journal.entries if entry.done]
            for unit in group:
                progress(seen, sum(sizes.values()))
                work.take(unit, older)
                seen += sizes[unit.path]
        progress(seen, seen)
        with _acting_as(target.root):
            store.seal(now=True)
            _note_losses(store, target.node, now_ns)
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
            self._done.problems.append(Problem(str(unit.path), f"it cannot be read: {e}"))
            return
        try:
            self._take(unit, fd, older)
        except FormatError as e:
            self._done.problems.append(Problem(str(unit.path), e.message))
        finally:
            os.close(fd)

    def _take(self, unit: Unit, fd: int, older: Sequence[Entry]) -> None:
        sha, crc = _digest(fd)
        if unit.segment is None or crc == unit.segment.crc:
            self._take_good(unit, fd, sha, older)
            return
        good = self._salvaged(unit.path, unit.segment, fd)
        try:
            self._take_good(unit, good, sha, older)
        finally:
            os.close(good)

    def _salvaged(self, path: Path, segment: Segment, fd: int) -> int:
        try:
            good, lost = self._decoder.salvage(
                fd, table=segment.table, rows=segment.rows, ts_min=segment.ts_min, ts_max=segment.ts_max
            )
        except FormatError as e:
            raise FormatError(f"its checksum is wrong: {e.message}") from e
        for group in lost:
            what = f"row group {group['group']} with {group['rows']} rows is damaged: the others are imported"
            self._done.problems.append(Problem(str(path), what))
        return good

    def _take_good(self, unit: Unit, fd: int, sha: str, older: Sequence[Entry]) -> None:
        if unit.void_from is not None:
            # The same bytes with another part behind them are other rows.
            sha = f"{sha}<{unit.void_from}"
        known = self._journal.find(sha)
        if known is not None and known.done:
            self._done.already += 1
            return
        spans = self._spans(unit, fd)
        wanted = spans if known else {n: s for n, s in spans.items() if not _is_here(unit, n, s, older)}
        wanted = {name: span for name, span in wanted.items() if span[0]}
        if wanted:
            self._check_times(wanted)
            self._bring(unit, fd, sha, wanted)
        elif spans:
            self._done.already += 1

    def _spans(self, unit: Unit, fd: int) -> dict[str, Span]:
        """What the file has, by table. All of it is decoded: of a file that is damaged somewhere no row comes in."""
        if unit.log:
            told = self._decoder.ask("log", fd, void_from=unit.void_from, send=False)
            for problem in told["problems"]:
                self._done.problems.append(Problem(str(unit.path), f"{problem}; what is before that is imported"))
            found = {str(n): (int(count), *map(int, told["ts"][n])) for n, count in told["rows"].items()}
            return {n: (s[0], s[1], s[2]) for n, s in found.items() if self._known(unit, n)}
        told = self._decoder.ask("segment", fd)
        name = self._name(unit, str(told["table"]))
        check_columns(self._target.tables[name], [str(column) for column in told["columns"]])
        return {name: (int(told["rows"]), int(told["ts_min"]), int(told["ts_max"]))}

    def _known(self, unit: Unit, name: str) -> bool:
        table = self._target.tables.get(name)
        if table is not None and not table.live:
            return True
        self._done.problems.append(Problem(str(unit.path), f"no stored table {name[:80]!r} is known here"))
        return False

    def _name(self, unit: Unit, told: str) -> str:
        """The table that a Parquet file holds, as it says itself, as its path says, or as the caller says."""
        tables = self._target.tables
        around = (unit.path.stem, *(parent.name for parent in list(unit.path.parents)[:3]))
        name = told or next((name for name in around if name in tables), self._table)
        if not name:
            raise FormatError("it does not say which table it holds: name it with --table")
        if name not in tables:
            raise FormatError(f"no table {name[:80]!r} is known here")
        return name

    def _check_times(self, spans: Mapping[str, Span]) -> None:
        """Raises FormatError for rows that would go at once, or never."""
        if max(span[2] for span in spans.values()) > self._now_ns + _DAY_NS:
            raise FormatError("it has rows of more than a day from now")
        if all(span[2] < self._now_ns - int(self._kept_s(name) * 1e9) for name, span in spans.items()):
            days = max(map(self._kept_s, spans)) / 86_400
            rows = sum(span[0] for span in spans.values())
            raise FormatError(f"all {rows} rows are older than the {days:g} days of store.max_age_days: raise it first")

    def _kept_s(self, name: str) -> float:
        limits = self._target.limits
        own = limits.tables.get(name)
        return min(limits.max_age_s, own.max_age_s if own and own.max_age_s is not None else limits.max_age_s)

    def _bring(self, unit: Unit, fd: int, sha: str, wanted: dict[str, Span]) -> None:
        with _acting_as(self._target.root):
            entry = self._journal.begin(sha, unit.node, unit.parts, wanted)
        if unit.log and not entry.pieces:
            # All its tables are one record.
            pieces = self._decoder.rows("log", fd, void_from=unit.void_from, send=True)
            self._append(entry, {name: self._fit(name, rows) for name, rows in pieces if name in wanted})
        elif not unit.log:
            (name,) = wanted
            for _, rows in self._decoder.rows("rows", fd, piece=PIECE_ROWS, skip=entry.pieces):
                self._append(entry, {name: self._fit(name, rows)})
        with _acting_as(self._target.root):
            self._store.sync()
            self._journal.finish(entry)
        self._done.files += 1

    def _fit(self, name: str, rows: pa.Table) -> pa.Table:
        return physical_rows(self._target.tables[name], rows)

    def _append(self, entry: Entry, rows: dict[str, pa.Table]) -> None:
        if sum(piece.nbytes for piece in rows.values()) > MAX_PIECE_BYTES:
            raise FormatError(f"some {PIECE_ROWS} rows of it are more than {MAX_PIECE_BYTES} bytes")
        batches = {name: piece.combine_chunks().to_batches() for name, piece in rows.items()}
        position = {"boot_id": "", "map_id": entry.number, "position": entry.pieces + 1}
        with _acting_as(self._target.root):
            self._store.append(batches, {RING: position})
            self._store.seal()
        entry.pieces += 1
        for name, piece in rows.items():
            self._done.rows[name] = self._done.rows.get(name, 0) + piece.num_rows


def _is_here(unit: Unit, name: str, span: Span, older: Sequence[Entry]) -> bool:
    """Whether these rows came with other files: a log part is sealed, and segments are merged, between two copies.

    Raises FormatError when some of them may have come.
    """
    if unit.parts is None or not unit.node:
        return False
    first, last = unit.parts
    known = [
        (entry.parts, entry.tables[name]) for entry in older
        if entry.parts and entry.node == unit.node and name in entry.tables
        and entry.parts[0] <= last and first <= entry.parts[1]
        and entry.tables[name][1] <= span[2] and span[1] <= entry.tables[name][2]
    ]  # fmt: skip
    if not known:
        return False
    if any(p[0] <= first and last <= p[1] and s[1] <= span[1] and span[2] <= s[2] for p, s in known):
        return True
    inside = all(first <= p[0] and p[1] <= last and span[1] <= s[1] and s[2] <= span[2] for p, s in known)
    if inside and sum(s[0] for _, s in known) == span[0]:
        return True
    raise FormatError(f"some of its rows were imported before from other files of {unit.node}: none is taken again")


@contextmanager
def _opened(target: Target) -> Iterator[Store]:
    """The store; what its start finds missing becomes rows, as when the daemon starts."""
    try:
        store = Store.open(target.root, node=target.node, limits=target.limits, tables=target.tables, background=False)
    except StateLocked as e:
        raise StateLocked(e.message, hint="stop it (`probingd stop`), import, and start it again") from e
    try:
        yield store
    finally:
        with _acting_as(target.root):
            store.close()


def _note_losses(store: Store, node: str, now_ns: int) -> None:
    losses = [*store.recovery_losses, *store.take_losses()]
    rows = [
        {
            "node": node, "ts": now_ns, "source": x.source, "table_name": x.table, "stage": x.stage,
            "reason": x.reason, "pid": x.pid, "ts_from": x.ts_from_ns, "ts_to": x.ts_to_ns, "count": x.count,
        }
        for x in losses
    ]  # fmt: skip
    if rows:
        store.append({"probing.losses": [batch_of("probing.losses", rows)]}, {})


def _check_space(target: Target, store: Store, need: int) -> None:
    used, limit = int(store.status()["bytes"]), target.limits.max_bytes
    if used + need > limit:
        hint = "raise store.max_bytes, or import less: the oldest rows would go as the new ones come"
        raise StoreFull(f"{need} bytes do not fit: {used} are used, store.max_bytes is {limit}", hint=hint)


@contextmanager
def _acting_as(root: Path) -> Iterator[None]:
    """As the owner of the state directory, so that all that is made belongs to the daemon's user."""
    owner = root.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        yield
        return
    group = os.getegid()
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _digest(fd: int) -> tuple[str, int]:
    """SHA-256 and CRC32 of an open file."""
    digest, crc, at = hashlib.sha256(), 0, 0
    while data := os.pread(fd, _READ_BYTES, at):
        digest.update(data)
        crc = zlib.crc32(data, crc)
        at += len(data)
    return digest.hexdigest(), crc
