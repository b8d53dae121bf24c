"""The store: a log to which records are appended, segments into which the log is sealed, and snapshots of both for
queries.

Locks, always taken in this order: the appender's (one record at a time), the editor's (one edit of the manifest at a
time), the state's (never held over a call to the file system). The appender's lock for syncing is taken alone, or while
the appender's first lock is held. ``_maintaining`` (one round at a time) is taken before all others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError, StoreError
from probing.api.tables import TABLES, Table
from probing.daemon.clock import Clock, ClockPair, SystemClock
from probing.daemon.source import Loss
from probing.daemon.store.appender import Appender
from probing.daemon.store.background import Background
from probing.daemon.store.context import StoreContext
from probing.daemon.store.directory_lock import lock_directory
from probing.daemon.store.files import Files, SystemFiles, store_error
from probing.daemon.store.format import Positions
from probing.daemon.store.limits import StoreLimits
from probing.daemon.store.log.decode import decode_part
from probing.daemon.store.log.parts import WAL_DIR
from probing.daemon.store.log.streams import conform
from probing.daemon.store.maintenance.compaction import Compactor
from probing.daemon.store.maintenance.grace import Deletion
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.quarantine import Quarantine
from probing.daemon.store.maintenance.sealing import Sealer
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.manifest import Segment
from probing.daemon.store.recovery.directory import Recovered
from probing.daemon.store.recovery.recover import recover
from probing.daemon.store.recovery.set_aside import CORRUPT_DIR, SetAside
from probing.daemon.store.segments.reader import read_segment
from probing.daemon.store.snapshot import StoreSnapshot, make_snapshot
from probing.daemon.store.state import StoreState
from probing.daemon.store.status import StoreStatus
from probing.daemon.store.tasks.worker import LocalWorker, Worker

__all__ = ("Store",)

# The time for which the process tries to make a deleted state directory again, ns.
_DELETED_NS = 10 * 1_000_000_000
# A snapshot holds its segments for the time limit of its query, but at most for _LONGEST_S, and for _MARGIN_S longer,
# in which the query's worker ends, s.
_LONGEST_S, _MARGIN_S = 3600.0, 60.0
# While sealing is behind, only one round of maintenance out of this many merges segments.
_MERGE_EACH = 5


class Store:
    """An open store, from ``Store.open``. Thread-safe."""

    def __init__(
        self,
        context: StoreContext,
        node: str,
        limits: StoreLimits,
        aside: SetAside,
        found: Recovered,
        lock_fd: int | None,
    ) -> None:
        self._context = context
        self._root = context.root
        self._node = node
        self._limits = limits
        self._aside = aside
        self._lock_fd = lock_fd
        self._state = context.state
        self._background = Background(self.sync, self.maintain, limits.sync_interval_s, context.state)
        self._editor = ManifestEditor(context, found.manifest, aside)
        self._space = Space(context, limits, self._editor, aside)
        self._sealer = Sealer(context, self._editor, self._space)
        self._quarantine = Quarantine(context, self._editor)
        self._compactor = Compactor(context, self._editor, self._space, self._quarantine)
        self._appender = Appender(context, node, self._space, found, limits.part_bytes, self._background.wake)
        self._maintaining = threading.Lock()
        # The number of consecutive rounds of maintenance in which sealing was behind.
        self._rounds_behind = 0
        self._torn = found.torn
        self._foreign = tuple(found.foreign)
        self.recovery_losses: tuple[Loss, ...] = tuple(found.losses)
        # When the directory was found to be deleted, CLOCK_MONOTONIC ns. None once it was made again.
        self._deleted_since: int | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        node: str,
        clock: Clock | None = None,
        limits: StoreLimits = StoreLimits(),  # noqa: B008
        files: Files | None = None,
        tables: Mapping[str, Table] = TABLES,
        background: bool = True,
        worker: Callable[[Files], Worker] = LocalWorker,
    ) -> Store:
        """Locks the state directory, recovers its files, and starts the threads that sync and maintain.

        Without ``background`` the caller must call ``sync`` and ``maintain``. ``worker`` makes the worker that seals
        and merges. ``files`` replaces the file system in tests, and then the directory is not locked. Raises
        StateLocked, StoreError when the directory cannot be used, FormatError for a newer format.
        """
        root = Path(path).absolute()
        clock = clock or SystemClock()
        own = files or SystemFiles()
        lock_fd: int | None = None
        try:
            own.make_dir(root)
            lock_fd = lock_directory(root) if files is None else None
            for folder in (WAL_DIR, CORRUPT_DIR):
                own.make_dir(root / folder)
            aside = SetAside(own, root, clock)
            found = recover(own, root, node, clock, aside)
            state = StoreState(own, root, found.parts, found.manifest.state.segments.values())
            if found.degraded:
                state.problems["manifest"] = found.degraded
            state.set_aside_bytes = aside.bytes
            store = cls(
                StoreContext(root, own, clock, tables, state, worker(own), set()), node, limits, aside, found, lock_fd
            )
        except BaseException as e:
            if lock_fd is not None:
                os.close(lock_fd)
            if isinstance(e, OSError):
                raise store_error(e, root) from e
            raise
        with contextlib.suppress(StoreError):
            store._space.check()
        if background:
            # Rows beyond the limits are dropped before the first append, and before the start counts as complete.
            with contextlib.suppress(StoreError):
                store._space.retain()
            store._background.start()
        return store

    @property
    def positions(self) -> Positions:
        """The ring positions in the last record of the log."""
        return self._appender.positions

    def append(
        self,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        positions: Positions,
        pair: ClockPair | None = None,
    ) -> None:
        """Writes one record. When ``append`` returns, the record is completely in the log. After an error, the record
        is not in the log at all.

        ``batches`` have the physical schemas of their tables. Rings missing in ``positions`` keep their positions.
        ``pair``: the instant of the drain, by default now. Raises StoreFull if there is no space even without the
        oldest segments, StoreError if the disk fails, InternalError for batches with other schemas, FormatError for
        rows that are too large for a record.
        """
        try:
            self._appender.append(batches, positions, pair or self._context.clock.pair())
        finally:
            # This is done after an error, too, because only a sync closes the file of the part that ended.
            self._background.appended()

    def sync(self) -> None:
        """Syncs all records appended so far, so that they survive a power cut. Raises StoreError."""
        self._appender.sync()

    def seal(self, now: bool = False) -> int:
        """Seals closed parts if there are enough, or with ``now`` the whole log. Returns the number of sealed parts.

        Raises StoreError or StoreFull; in that case the parts stay in the log, and the next call tries to seal them
        again.
        """
        if now:
            self._appender.end_part()
        return self._sealer.seal(now)

    def maintain(self) -> None:
        """Runs one round of maintenance, which is due each second: ends expired leases, drops rows beyond the limits,
        seals, merges for a short time, and checks a segment.

        Raises StoreError.
        """
        with self._maintaining:
            # With a quota or reserved blocks, a file system shows free space although nothing can be written. Only a
            # failed write shows that space is short.
            is_short = self._state.full or "append" in self._state.problems
            self._state.expire(self._context.clock.pair().mono_ns, short=is_short)
            if self._editor.is_deleted():
                self._remake()
            # Retention runs first: sealing needs space.
            self._space.retain()
            self._sealer.seal(False)
            # While sealing is behind, merging runs less often. It does not stop, because small segments would pile up.
            self._rounds_behind = self._rounds_behind + 1 if self._sealer.is_behind else 0
            if self._rounds_behind % _MERGE_EACH == 0:
                self._compactor.turn()
            self._quarantine.scrub()
            self._context.worker.rest()

    def check(self) -> None:
        """Raises StoreError when the state directory was deleted and could not be made again for 10 s.

        A new process may be able to make the directory.
        """
        if self._deleted_since is not None and self._context.clock.pair().mono_ns - self._deleted_since > _DELETED_NS:
            raise StoreError(self._state.problems.get("remake", "the state directory was deleted"))

    def set_limits(self, limits: StoreLimits) -> None:
        """Sets new limits. Rows beyond stricter limits are deleted by the first ``maintain`` after
        ``limits.grace_s``.
        """
        self._limits = limits
        self._appender.part_bytes = limits.part_bytes
        self._space.set_limits(limits)
        self._background.sync_interval_s = limits.sync_interval_s
        self._background.wake()

    def deletion(self, limits: StoreLimits) -> Deletion:
        """Returns the rows that ``limits`` would delete now, but the configured limits would not. Raises StoreError."""
        try:
            return self._space.deletion(limits)
        except OSError as e:
            raise store_error(e, self._root) from e

    def waiting(self) -> dict[str, Deletion]:
        """Returns the rows that new, stricter limits will delete, by the key of their setting. Raises StoreError."""
        try:
            return self._space.waiting()
        except OSError as e:
            raise store_error(e, self._root) from e

    def verify(self) -> list[str]:
        """Checks all segments against the manifest, sets bad segments aside, and returns their problems."""
        return self._quarantine.check_all()

    def quarantine(self, path: str | Path, reason: str) -> bool:
        """Checks the segment ``path`` (absolute), which a reader could not read; sets it aside if it is bad.

        Returns whether it was bad.
        """
        with contextlib.suppress(ValueError):
            return bool(self._quarantine.check(Path(path).relative_to(self._root).as_posix(), reason))
        return False

    def snapshot(self, wanted: Callable[[Segment], bool] = lambda _: True, seconds: float = 0.0) -> StoreSnapshot:
        """Returns the files that a query reads: the ``wanted`` segments, and the log. ``seconds``: the time limit of
        the query; more than an hour counts as an hour.

        The files stay until ``release(snapshot["generation"])``, but at most for ``lease_s``; segments stay longer for
        a longer query while there is space to append.
        """
        until_ns = self._context.clock.pair().mono_ns + int((min(seconds, _LONGEST_S) + _MARGIN_S) * 1e9)
        generation, segments, parts = self._state.lease(self._lease_end(), until_ns, wanted)
        return make_snapshot(generation, self._node, self._root, segments, parts)

    def release(self, generation: int) -> None:
        """Releases the files of a snapshot. Unknown generations are ignored."""
        self._state.release(generation)

    def rows(self, table: str, columns: Sequence[str] | None = None, since_ns: int = 0) -> pa.Table:
        """Returns all rows of a table in its physical schema, for the daemon itself; queries use ``snapshot``.

        Leaves out segments whose last row is before ``since_ns`` (UTC), and sets bad segments aside. Raises KeyError
        for an unknown table.
        """
        schema = self._context.tables[table].physical
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        generation, segments, parts = self._state.lease(self._lease_end())
        pieces = []
        try:
            for segment in segments:
                wanted = segment.table == table and segment.ts_max >= since_ns
                found = self._read(segment, schema.names) if wanted else None
                if found is not None:
                    pieces.append(conform(found, schema))
            for part in parts:
                if table in part.rows:
                    data = self._context.files.read(part.path, part.length)
                    decoded = decode_part(data, {table}, self._context.tables)
                    pieces += [conform(rows, schema) for rows in decoded.tables.values()]
        finally:
            self.release(generation)
        return pa.concat_tables(pieces).unify_dictionaries() if pieces else schema.empty_table()

    def take_losses(self) -> list[Loss]:
        """Returns the losses since the last call; losses found at the start are in ``recovery_losses``."""
        return self._state.take_losses()

    def status(self) -> StoreStatus:
        return {
            **self._state.describe(self._context.worker.problem),
            "set_aside": self._aside.count,
            "torn_records": self._torn,
            "foreign": list(self._foreign),
        }

    def close(self) -> None:
        """Syncs, stops the threads and unlocks the directory. The next start seals the remaining parts."""
        self._background.stop()
        with self._maintaining:
            self._compactor.stop()
            self._context.worker.close()
        if self._appender.close():
            self._editor.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lease_end(self) -> int:
        return self._context.clock.pair().mono_ns + int(self._limits.lease_s * 1e9)

    def _read(self, segment: Segment, columns: list[str]) -> pa.Table | None:
        try:
            return read_segment(self._context.files, self._root, segment, columns)
        except (FormatError, OSError) as e:
            self._quarantine.check(segment.path, str(e))
            return None

    def _remake(self) -> None:
        """Makes the state directory again after it, or its log, was deleted; records the losses."""
        self._deleted_since = self._deleted_since or self._context.clock.pair().mono_ns
        # The file of the live part may be gone with the directory.
        self._appender.end_part()
        try:
            for folder in (WAL_DIR, CORRUPT_DIR):
                self._context.files.make_dir(self._root / folder)
            if self._lock_fd is not None and not self._is_locked(self._lock_fd):
                fd, self._lock_fd = self._lock_fd, lock_directory(self._root)
                os.close(fd)
            self._editor.remake()
        except OSError as e:
            self._state.problems["remake"] = f"the state directory was deleted, and cannot be made again: {e.strerror}"
            raise store_error(e, self._root) from e
        self._state.problems.pop("remake", None)
        self._deleted_since = None

    def _is_locked(self, fd: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(fd), (self._root / "lock").stat(follow_symlinks=False))
        return False
