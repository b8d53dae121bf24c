"""The store: one log that is appended to, segments that it is sealed into, and snapshots of both for queries.

Locks, always taken in this order: ``_appending`` (one record at a time), the keeper's (sealing and retention), the
inventory's (what a snapshot sees; never held over a call to the file system). ``_syncing`` is only held by itself or
under ``_appending``, ``_maintaining`` (one merge at a time) before the keeper's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError, ProbingError, StoreError, StoreFull
from probing.api.tables import TABLES, Table
from probing.daemon.clock import Clock, ClockPair, SystemClock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files, SystemFiles, lock_directory
from probing.daemon.store.jobs.runner import LocalWorker, Worker
from probing.daemon.store.limits import StoreLimits
from probing.daemon.store.log.parts import WAL_DIR, PartWriter, part_path
from probing.daemon.store.log.records import PartHeader, Positions
from probing.daemon.store.log.streams import conform
from probing.daemon.store.log.tail import decode_tail
from probing.daemon.store.maintenance.compaction import Compactor
from probing.daemon.store.maintenance.manifest_editor import NO_SPACE, Keeper, store_error
from probing.daemon.store.manifest import Segment
from probing.daemon.store.recovery.recover import CORRUPT_DIR, Recovered, SetAside, recover
from probing.daemon.store.segments.reader import read_segment
from probing.daemon.store.snapshot import Snapshot, describe_part, describe_segment_file
from probing.daemon.store.state import Inventory

__all__ = ("Store",)

# Small drains lie compressed in the log; what a query must decode is bounded by this many times part_bytes.
_RAW_FACTOR = 2
# How long a deleted state directory is tried to be made again by this process.
_GONE_NS = 10 * 1_000_000_000


class Store:
    """Safe to call from any thread. Made by ``Store.open``."""

    def __init__(
        self,
        root: Path,
        node: str,
        clock: Clock,
        limits: StoreLimits,
        files: Files,
        tables: Mapping[str, Table],
        aside: SetAside,
        found: Recovered,
        lock_fd: int | None,
        worker: Worker,
    ) -> None:
        self._root = root
        self._node = node
        self._clock = clock
        self._limits = limits
        self._files = files
        self._tables = tables
        self._aside = aside
        self._lock_fd = lock_fd
        self._inventory = Inventory(files, root, found, aside.bytes)
        self._worker = worker
        self._keeper = Keeper(self._worker, files, root, clock, limits, tables, self._inventory, found.manifest, aside)
        self._compactor = Compactor(self._worker, files, root, clock, tables, self._inventory, self._keeper)
        self._maintaining = threading.Lock()
        self._appending = threading.Lock()
        self._syncing = threading.Lock()
        self._writer: PartWriter | None = None
        self._positions = found.positions
        self._next_sequence = found.next_sequence
        self._next_part = found.next_part
        # Descriptors of closed parts that are not synced yet. Only sync() and close() close descriptors.
        self._retired: list[int] = []
        self._synced: tuple[int, int] = (0, 0)
        # Numbers of the newest part, and of the newest whose name is synced.
        self._newest = self._newest_synced = 0
        self._torn = found.torn
        self._foreign = tuple(found.foreign)
        self.recovery_losses: tuple[Loss, ...] = tuple(found.losses)
        self._stop = threading.Event()
        self._unsynced = threading.Event()
        self._kick = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closed = False
        # Monotonic.
        self._gone_since: int | None = None

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
        """Lock the state directory, recover what is there, and start the threads that sync and seal.

        Without ``background`` nothing happens by itself: the caller calls ``sync`` and ``maintain``. ``worker`` seals
        and merges. ``files`` replaces the file system (and its lock) in tests. Raises StateLocked, StoreError when the
        directory cannot be used, FormatError for a newer format.
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
            store = cls(root, node, clock, limits, own, tables, aside, found, lock_fd, worker(own))
        except BaseException as e:
            if lock_fd is not None:
                os.close(lock_fd)
            if isinstance(e, OSError):
                raise store_error(e, root) from e
            raise
        with contextlib.suppress(StoreError):
            store._keeper.check_space()
        if background:
            store._start()
        return store

    @property
    def positions(self) -> Positions:
        """Ring positions of the last record that is in the log: {ring: {"boot_id", "map_id", "position"}}."""
        return {ring: dict(position) for ring, position in self._positions.items()}

    def append(
        self,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        positions: Positions,
        pair: ClockPair | None = None,
    ) -> None:
        """Write one record: all of it is in the log when this returns, or none of it after an error.

        ``batches`` have the physical schemas of their tables; ``positions`` of rings that are left out stay as they
        were; ``pair`` is the instant of the drain, now by default. Raises StoreFull when there is no space even without
        the oldest segments, StoreError when the disk fails, InternalError for batches that do not fit, FormatError for
        more than a record holds.
        """
        clock = pair or self._clock.pair()
        with self._appending:
            if self._closed:
                raise StoreError("the store is closed")
            if self._inventory.full:
                self._make_space()
            merged = {**self._positions, **positions}
            try:
                self._write(batches, clock, merged)
            except OSError as first:
                self._retire()
                if not self._remedied(first):
                    raise self._append_error(first) from first
                try:
                    self._write(batches, clock, merged)
                except OSError as e:
                    self._retire()
                    raise self._append_error(e) from e
            except FormatError:
                # The part's Arrow streams are ahead of what is in it.
                self._retire()
                raise
            self._inventory.problems.pop("append", None)
            self._unsynced.set()

    def sync(self) -> None:
        """Make what was appended so far survive a power cut. Raises StoreError."""
        with self._syncing:
            # In this order: a part that is made or closed meanwhile is the next round's.
            newest, retired, writer = self._newest, list(self._retired), self._writer
            try:
                for fd in retired:
                    self._files.fsync(fd)
                    self._retired.remove(fd)
                    self._files.close(fd)
                # The writer may be retired meanwhile, but its descriptor is only closed here.
                if writer is not None and (state := (writer.part.number, writer.part.length)) != self._synced:
                    self._files.fsync(writer.fd)
                    self._synced = state
                if newest != self._newest_synced:
                    self._files.fsync_dir(self._root / WAL_DIR)
                    self._newest_synced = newest
            except OSError as e:
                self._inventory.problems["sync"] = f"the log cannot be synced: {e.strerror or e}"
                raise store_error(e, self._root) from e
            self._inventory.problems.pop("sync", None)

    def seal(self, now: bool = False) -> int:
        """Seal closed parts into segments when there is enough of them, or with ``now`` all there is; returns how many.

        Raises StoreError or StoreFull; the parts stay, and are tried again.
        """
        if now:
            with self._appending:
                self._retire()
        return self._keeper.seal(now)

    def maintain(self) -> None:
        """What the background thread does each second: leases, retention, sealing, some merging, a segment's checksum.

        Raises StoreError.
        """
        with self._maintaining:
            self._inventory.expire(self._clock.pair().mono_ns)
            if self._keeper.is_gone():
                self._remake()
            # Space first: sealing needs some.
            self._keeper.retain()
            self._keeper.seal(False)
            if not self._keeper.is_behind:
                self._compactor.turn()
            self._keeper.scrub()
            self._worker.rest()

    def check(self) -> None:
        """Raises StoreError when the state directory was deleted and could not be made again for a while: a fresh
        process may be able to."""
        if self._gone_since is not None and self._clock.pair().mono_ns - self._gone_since > _GONE_NS:
            raise StoreError(self._inventory.problems.get("remake", "the state directory was deleted"))

    def _remake(self) -> None:
        """The state directory was deleted, or its log: make it again, and say what was lost."""
        self._gone_since = self._gone_since or self._clock.pair().mono_ns
        with self._appending:
            # Its file may be gone with the directory, and what is appended to it with it.
            self._retire()
        try:
            for folder in (WAL_DIR, CORRUPT_DIR):
                self._files.make_dir(self._root / folder)
            if self._lock_fd is not None and not self._is_locked(self._lock_fd):
                fd, self._lock_fd = self._lock_fd, lock_directory(self._root)
                os.close(fd)
            self._keeper.remake()
        except OSError as e:
            self._inventory.problems["remake"] = (
                f"the state directory was deleted, and cannot be made again: {e.strerror}"
            )
            raise store_error(e, self._root) from e
        self._inventory.problems.pop("remake", None)
        self._gone_since = None

    def _is_locked(self, fd: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(fd), (self._root / "lock").stat(follow_symlinks=False))
        return False

    def set_limits(self, limits: StoreLimits) -> None:
        """Other limits from now on; what is over them goes with the next ``maintain``, which begins at once."""
        self._limits = limits
        self._keeper.set_limits(limits)
        self._kick.set()

    def verify(self) -> list[str]:
        """Check all segments against the manifest. Bad ones are set aside, each with a loss, and named."""
        return self._keeper.verify()

    def quarantine(self, path: str | Path, reason: str) -> bool:
        """Set a segment aside that a reader found bad, if it is bad: True when it was. ``path`` as in a snapshot."""
        with contextlib.suppress(ValueError):
            return bool(self._keeper.quarantine(Path(path).relative_to(self._root).as_posix(), reason))
        return False

    def snapshot(self, wanted: Callable[[Segment], bool] = lambda _: True) -> Snapshot:
        """What a query reads, as JSON-able values: the ``wanted`` segments and the log. Its files stay until
        ``release(snapshot["generation"])``."""
        generation, segments, parts = self._inventory.lease(self._lease_end(), wanted)
        tables: dict[str, list[dict[str, Any]]] = {}
        for segment in sorted(segments, key=lambda s: (s.ts_min, s.path)):
            tables.setdefault(segment.table, []).append(describe_segment_file(self._root, segment))
        return {
            "generation": generation,
            "node": self._node,
            "root": str(self._root),
            "tables": tables,
            "parts": [describe_part(part) for part in parts],
        }

    def release(self, generation: int) -> None:
        """The query is done: what only its snapshot held may go. Unknown generations are ignored."""
        self._inventory.release(generation)

    def rows(self, table: str, columns: Sequence[str] | None = None, since_ns: int = 0) -> pa.Table:
        """All rows of a table in its physical schema, for the daemon itself; queries go through ``snapshot``.

        Segments whose last row is before ``since_ns`` (UTC) are left out, bad ones are set aside. Raises
        KeyError for a table that is not known.
        """
        schema = self._tables[table].physical
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        generation, segments, parts = self._inventory.lease(self._lease_end())
        pieces = []
        try:
            for segment in segments:
                wanted = segment.table == table and segment.ts_max >= since_ns
                found = self._read(segment, schema.names) if wanted else None
                if found is not None:
                    pieces.append(conform(found, schema))
            for part in parts:
                if table in part.rows:
                    tail = decode_tail(self._files.read(part.path, part.length), {table}, self._tables)
                    pieces += [conform(rows, schema) for rows in tail.tables.values()]
        finally:
            self.release(generation)
        return pa.concat_tables(pieces).unify_dictionaries() if pieces else schema.empty_table()

    def take_losses(self) -> list[Loss]:
        """Losses found since the start (``recovery_losses`` has those found at it); each is given once."""
        return self._inventory.take_losses()

    def status(self) -> dict[str, Any]:
        """JSON-able: state (running or degraded) with reason, bytes, segments, parts, tables, counts, foreign files."""
        found = {"set_aside": self._aside.count, "torn_records": self._torn, "foreign": list(self._foreign)}
        return {**self._inventory.describe(self._worker.problem), **found}

    def close(self) -> None:
        """Sync, stop the threads, give the directory back. What is not sealed is sealed after the next start."""
        self._stop.set()
        self._kick.set()
        self._unsynced.set()
        for thread in self._threads:
            thread.join()
        with self._maintaining:
            self._compactor.stop()
            self._worker.close()
        with self._appending:
            if self._closed:
                return
            self._closed = True
            self._retire()
            with contextlib.suppress(StoreError):
                self.sync()
            for fd in self._retired:
                self._files.close(fd)
            self._keeper.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, batches: Mapping[str, Sequence[pa.RecordBatch]], clock: ClockPair, positions: Positions) -> None:
        if self._writer is not None and not self._writer.takes(name for name, group in batches.items() if group):
            self._retire()
        writer = self._writer or self._open_part(clock)
        before = writer.part
        writer.append(batches, self._clock.boot_id, clock, positions)
        after = writer.part
        self._inventory.appended(before, after)
        self._positions = positions
        self._next_sequence = after.next_sequence
        limit = self._limits.part_bytes
        if after.length >= limit or after.raw_bytes >= limit * _RAW_FACTOR:
            self._retire()
            self._kick.set()

    def _open_part(self, clock: ClockPair) -> PartWriter:
        header = PartHeader(self._next_part, self._next_sequence, self._node, clock.real_ns, self._positions)
        # A number is used once, also when the part could not be made: its file may be there.
        self._next_part += 1
        self._writer = PartWriter(self._files, part_path(self._root, header.number), header, self._tables)
        self._newest = header.number
        return self._writer

    def _retire(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._retired.append(writer.fd)
        self._inventory.part_closed(writer.part if writer.has_records else None)
        if not writer.has_records:
            self._inventory.remove([writer.part.path])

    def _remedied(self, e: OSError) -> bool:
        """Whether it is worth trying again."""
        if e.errno == errno.ENOENT:
            # The directory was deleted. What is lost with it is found by the next maintain().
            with contextlib.suppress(OSError):
                self._files.make_dir(self._root / WAL_DIR)
                self._kick.set()
                return True
        return e.errno in NO_SPACE and self._keeper.drop_cold(self._limits.part_bytes)

    def _make_space(self) -> None:
        with contextlib.suppress(StoreError):
            self._keeper.retain()
        if self._inventory.full:
            raise StoreFull(f"the state directory {self._root} is at its limit: {self._keeper.over_limits()}")

    def _append_error(self, e: OSError) -> StoreError:
        error = store_error(e, self._root)
        self._inventory.problems["append"] = error.message
        return error

    def _lease_end(self) -> int:
        return self._clock.pair().mono_ns + int(self._limits.lease_s * 1e9)

    def _read(self, segment: Segment, columns: list[str]) -> pa.Table | None:
        try:
            return read_segment(self._files, self._root, segment, columns)
        except (FormatError, OSError) as e:
            self._keeper.quarantine(segment.path, str(e))
            return None

    def _start(self) -> None:
        # No room is known before the first row comes, and to whoever waits for the start.
        with contextlib.suppress(StoreError):
            self._keeper.retain()
        for name, target in (("store-sync", self._sync_loop), ("store-maintain", self._maintain_loop)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _sync_loop(self) -> None:
        while not self._stop.is_set():
            # At once behind the first record, so that what waits for the disk is never older than the interval.
            self._unsynced.wait()
            self._unsynced.clear()
            try:
                self.sync()
            except StoreError:
                # The reason is in the status, and the next round tries again.
                self._unsynced.set()
            self._stop.wait(self._limits.sync_interval_s)

    def _maintain_loop(self) -> None:
        while not self._stop.is_set():
            self._kick.wait(1.0)
            self._kick.clear()
            if self._stop.is_set():
                return
            try:
                self.maintain()
            except (ProbingError, pa.ArrowException) as e:
                self._inventory.problems["maintain"] = str(e)
            else:
                self._inventory.problems.pop("maintain", None)
