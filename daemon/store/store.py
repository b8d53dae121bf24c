"""The store: one log that is appended to, segments that it is sealed into, and snapshots of both for queries.

Locks, always taken in this order: ``_appending`` (one record at a time), ``_keeping`` (sealing, retention, everything
that edits the manifest), ``_state`` (what a snapshot sees; never held over a call to the file system but unlink).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError, InternalError, ProbingError, StoreError, StoreFull
from probing.api.tables import TABLES, Table
from probing.daemon.clock import Clock, ClockPair, SystemClock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files, SystemFiles, lock_directory
from probing.daemon.store.manifest import Edit, Segment
from probing.daemon.store.records import PartHeader, Positions
from probing.daemon.store.recovery import CORRUPT_DIR, Recovered, SetAside, recover
from probing.daemon.store.retention import StoreLimits, to_drop
from probing.daemon.store.sealing import group_parts, seal_parts
from probing.daemon.store.segments import check_segment, read_segment
from probing.daemon.store.snapshot import Leases, Snapshot, describe_part, describe_segment_file
from probing.daemon.store.streams import conform
from probing.daemon.store.tail import decode_tail
from probing.daemon.store.wal import WAL_DIR, Part, PartWriter, part_path

__all__ = ("Store",)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MAX_CLOSED_PARTS = 16
# Small drains lie compressed in the log; what a query must decode is bounded by this many times part_bytes.
_RAW_FACTOR = 2
_SCRUB_INTERVAL_NS = 24 * 3_600 * 1_000_000_000
_MAX_LOSSES = 1000


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
    ) -> None:
        self._root = root
        self._node = node
        self._clock = clock
        self._limits = limits
        self._files = files
        self._tables = tables
        self._aside = aside
        self._manifest = found.manifest
        self._lock_fd = lock_fd
        self._appending = threading.Lock()
        self._keeping = threading.RLock()
        self._state = threading.Lock()
        self._syncing = threading.Lock()
        self._writer: PartWriter | None = None
        self._live: Part | None = None
        self._parts = found.parts
        self._segments = dict(found.manifest.state.segments)
        self._positions = found.positions
        self._next_sequence = found.next_sequence
        self._next_part = found.next_part
        self._retired: list[int] = []
        self._synced: tuple[int, int] = (0, 0)
        self._wal_dir_dirty = False
        self._leases = Leases()
        self._leftovers: set[Path] = set()
        self._gone: set[str] = set()
        self._unverified: deque[str] = deque(self._segments)
        self._scrubbed_ns = clock.pair().mono_ns
        self._corrupt_bytes = aside.bytes
        self._problems: dict[str, str] = {"manifest": found.degraded} if found.degraded else {}
        self._full = False
        self._losses: list[Loss] = []
        self._counts = {"records": 0, "rows": 0, "sealed_parts": 0, "dropped_segments": 0, "dropped_rows": 0}
        self._torn = found.torn
        self._foreign = tuple(found.foreign)
        self.recovery_losses: tuple[Loss, ...] = tuple(found.losses)
        self._stop = threading.Event()
        self._kick = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closed = False

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
    ) -> Store:
        """Lock the state directory, recover what is there, and start the threads that sync and seal.

        Without ``background`` nothing happens by itself: the caller calls ``sync`` and ``maintain``. ``files`` replaces
        the file system (and its lock) in tests. Raises StateLocked, StoreError when the directory cannot be used,
        FormatError for a newer format.
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
            store = cls(root, node, clock, limits, own, tables, aside, recover(own, root, node, clock, aside), lock_fd)
        except BaseException as e:
            if lock_fd is not None:
                os.close(lock_fd)
            if isinstance(e, OSError) and not isinstance(e, ProbingError):
                raise _store_error(e, root) from e
            raise
        if background:
            store._start()
        return store

    @property
    def positions(self) -> Positions:
        """Ring positions of the last record that is in the log: {ring: {"boot_id", "map_id", "position"}}."""
        with self._state:
            return {ring: dict(position) for ring, position in self._positions.items()}

    def append(
        self,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        positions: Positions,
        pair: ClockPair | None = None,
    ) -> None:
        """Write one record: all of it is in the log when this returns, or none of it after an error.

        ``batches`` have the physical schemas of their tables; ``positions`` of rings that are left out stay as they
        were. Raises StoreFull when there is no space even without the oldest segments, StoreError when the disk
        fails, InternalError for batches that do not fit.
        """
        clock = pair or self._clock.pair()
        with self._appending:
            if self._closed:
                raise StoreError("the store is closed")
            if self._full:
                self._make_space(0)
            merged = {**self._positions, **positions}
            try:
                self._write(batches, clock, merged)
            except OSError as first:
                self._retire()
                if first.errno not in _NO_SPACE or not self._drop_cold(self._limits.part_bytes):
                    raise self._append_error(first) from first
                try:
                    self._write(batches, clock, merged)
                except OSError as e:
                    self._retire()
                    raise self._append_error(e) from e
            self._problems.pop("append", None)

    def sync(self) -> None:
        """Make what was appended so far survive a power cut. Raises StoreError."""
        with self._syncing:
            with self._state:
                retired = list(self._retired)
                writer, live = self._writer, self._live
                dirty, self._wal_dir_dirty = self._wal_dir_dirty, False
            try:
                for fd in retired:
                    self._files.fsync(fd)
                    with self._state:
                        self._retired.remove(fd)
                    self._files.close(fd)
                # Only this function and close() close descriptors, so the writer's is open.
                if writer is not None and live is not None and (live.number, live.length) != self._synced:
                    self._files.fsync(writer.fd)
                    self._synced = (live.number, live.length)
                if dirty:
                    self._files.fsync_dir(self._root / WAL_DIR)
            except OSError as e:
                self._wal_dir_dirty = True
                self._problems["sync"] = f"the log cannot be synced: {e.strerror or e}"
                raise _store_error(e, self._root) from e
            self._problems.pop("sync", None)

    def seal(self, now: bool = False) -> int:
        """Seal closed parts into segments when there is enough of them, or with ``now`` all there is; returns how many.

        Raises StoreError or StoreFull; the parts stay, and are tried again.
        """
        if now:
            with self._appending:
                self._retire()
        with self._keeping:
            with self._state:
                parts = list(self._parts)
            enough = sum(p.raw_bytes for p in parts) >= self._limits.part_bytes or len(parts) >= _MAX_CLOSED_PARTS
            if not parts or not (now or enough):
                return 0
            try:
                for group in group_parts(parts):
                    self._seal_group(group)
            except OSError as e:
                self._problems["seal"] = f"log parts cannot be sealed: {e.strerror or e}"
                if e.errno in _NO_SPACE:
                    self._drop_cold(self._limits.part_bytes)
                raise _store_error(e, self._root) from e
            self._problems.pop("seal", None)
            return len(parts)

    def maintain(self) -> None:
        """What the background thread does each second: leases, sealing, retention, one segment's checksum.

        Raises StoreError.
        """
        now = self._clock.pair().mono_ns
        with self._state:
            expired = self._leases.expire(now)
        self._sweep(expired)
        # Space first: sealing needs some.
        self._retain()
        self.seal()
        self.verify(1)

    def verify(self, count: int | None = None) -> list[str]:
        """Check segments against the manifest, ``count`` of those that wait for it or all there are.

        Bad ones are set aside, each with a loss, and named in the answer.
        """
        bad = []
        with self._keeping:
            now = self._clock.pair().mono_ns
            if count is None or (not self._unverified and now - self._scrubbed_ns > _SCRUB_INTERVAL_NS):
                self._unverified, self._scrubbed_ns = deque(self._segments), now
            for _ in range(len(self._unverified) if count is None else min(count, len(self._unverified))):
                segment = self._segments.get(self._unverified.popleft())
                problem = check_segment(self._files, self._root, segment) if segment else ""
                if segment and problem:
                    self._set_aside(segment, problem)
                    bad.append(f"{segment.path}: {problem}")
        return bad

    def quarantine(self, path: str | Path, reason: str) -> bool:
        """Set a segment aside that a reader found bad, if it is bad: True when it was. ``path`` as in a snapshot."""
        with self._keeping, contextlib.suppress(ValueError):
            segment = self._segments.get(Path(path).relative_to(self._root).as_posix())
            if segment and (problem := check_segment(self._files, self._root, segment)):
                self._set_aside(segment, f"{problem} ({reason})")
                return True
        return False

    def snapshot(self) -> Snapshot:
        """What a query reads, as JSON-able values. Its files stay until ``release(snapshot["generation"])``."""
        generation, segments, parts = self._lease()
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
        with self._state:
            free = self._leases.release(generation)
        self._sweep(free)

    def rows(self, table: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a table in its physical schema, for the daemon itself; queries go through ``snapshot``.

        A segment that is bad is set aside. Raises KeyError for a table that is not known.
        """
        schema = self._tables[table].physical
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        generation, segments, parts = self._lease()
        pieces = []
        try:
            for segment in segments:
                found = self._read(segment, schema.names) if segment.table == table else None
                if found is not None:
                    pieces.append(conform(found, schema))
            for part in parts:
                if table in part.rows:
                    tail = decode_tail(self._files.read(part.path, part.length), {table}, self._tables)
                    pieces.append(conform(tail.tables[table], schema))
        finally:
            self.release(generation)
        return pa.concat_tables(pieces).unify_dictionaries() if pieces else schema.empty_table()

    def take_losses(self) -> list[Loss]:
        """Losses found since the start (``recovery_losses`` has those found at it); each is given once."""
        with self._state:
            losses, self._losses = self._losses, []
        return losses

    def status(self) -> dict[str, Any]:
        """JSON-able: state (running or degraded) with reason, bytes, segments, parts, tables, counts, foreign files."""
        with self._state:
            segments = list(self._segments.values())
            parts = [*self._parts, *([self._live] if self._live else [])]
            counts = dict(self._counts)
            leases = self._leases.count
        tables: dict[str, dict[str, int]] = {}
        for s in segments:
            own = tables.setdefault(s.table, {"segments": 0, "bytes": 0, "rows": 0, "ts_min": s.ts_min})
            own["segments"] += 1
            own["bytes"] += s.size
            own["rows"] += s.rows
            own["ts_min"] = min(own["ts_min"], s.ts_min)
        problems = sorted(self._problems.values())
        segment_bytes = sum(s.size for s in segments)
        return {
            "state": "degraded" if problems else "running",
            "reason": "; ".join(problems),
            "bytes": segment_bytes + self._other_bytes(),
            "segment_bytes": segment_bytes,
            "log_bytes": sum(p.length for p in parts),
            "segments": len(segments),
            "parts": len(parts),
            "tables": tables,
            "leases": leases,
            "set_aside": self._aside.count,
            "torn_records": self._torn,
            "foreign": list(self._foreign),
            **counts,
        }

    def close(self) -> None:
        """Sync, stop the threads, give the directory back. What is not sealed is sealed after the next start."""
        self._stop.set()
        self._kick.set()
        for thread in self._threads:
            thread.join()
        with self._appending:
            if self._closed:
                return
            self._closed = True
            self._retire()
            with contextlib.suppress(StoreError):
                self.sync()
            for fd in self._retired:
                self._files.close(fd)
            with self._keeping:
                self._manifest.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lease(self) -> tuple[int, list[Segment], list[Part]]:
        until = self._clock.pair().mono_ns + int(self._limits.lease_s * 1e9)
        with self._state:
            parts = [*self._parts, *([self._live] if self._live else [])]
            parts = [part for part in parts if part.rows]
            segments = list(self._segments.values())
            names = {self._root / s.path for s in segments} | {p.path for p in parts}
            return self._leases.take(names, until), segments, parts

    def _read(self, segment: Segment, columns: list[str]) -> pa.Table | None:
        try:
            return read_segment(self._files, self._root, segment, columns)
        except (FormatError, OSError) as e:
            self.quarantine(self._root / segment.path, str(e))
            return None

    def _write(self, batches: Mapping[str, Sequence[pa.RecordBatch]], clock: ClockPair, positions: Positions) -> None:
        writer = self._writer or self._open_part(clock)
        before = writer.part
        writer.append(batches, self._clock.boot_id, clock, positions)
        after = writer.part
        with self._state:
            self._live = after
            self._positions = positions
            self._next_sequence = after.next_sequence
            self._counts["records"] += 1
            self._counts["rows"] += sum(after.rows.values()) - sum(before.rows.values())
        limit = self._limits.part_bytes
        if after.length >= limit or after.raw_bytes >= limit * _RAW_FACTOR:
            self._retire()
            self._kick.set()

    def _open_part(self, clock: ClockPair) -> PartWriter:
        header = PartHeader(self._next_part, self._next_sequence, self._node, clock.real_ns, self._positions)
        # A number is used once, also when the part could not be made: its file may be there.
        self._next_part += 1
        writer = PartWriter(self._files, part_path(self._root, header.number), header, self._tables)
        with self._state:
            self._writer, self._wal_dir_dirty = writer, True
        return writer

    def _retire(self) -> None:
        with self._state:
            writer, self._writer, self._live = self._writer, None, None
            if writer is None:
                return
            self._retired.append(writer.fd)
            if writer.has_records:
                self._parts = [*self._parts, writer.part]
        if not writer.has_records:
            with contextlib.suppress(OSError):
                self._files.unlink(writer.part.path)

    def _append_error(self, e: OSError) -> StoreError:
        error = _store_error(e, self._root)
        self._problems["append"] = error.message
        return error

    def _seal_group(self, group: list[Part]) -> None:
        try:
            sealed = seal_parts(
                self._files, self._root, group, self._clock.pair().real_ns, self._leftovers, self._tables
            )
        except (pa.ArrowException, FormatError) as e:
            # One part that cannot be sealed must not keep all later ones in the log.
            if len(group) == 1:
                self._give_up(group[0], str(e))
                return
            for part in group:
                self._seal_group([part])
            return
        last = group[-1]
        self._commit(
            Edit(
                tuple(sealed.segments),
                sealed_to=last.number,
                next_sequence=last.next_sequence,
                positions=last.positions,
            )
        )
        with self._state:
            self._segments.update({s.path: s for s in sealed.segments})
            self._parts = [p for p in self._parts if p.number > last.number]
            self._counts["sealed_parts"] += len(group)
            self._add_losses(sealed.losses)
        self._remove(p.path for p in group)

    def _give_up(self, part: Part, problem: str) -> None:
        self._commit(Edit(sealed_to=part.number, next_sequence=part.next_sequence, positions=part.positions))
        now = self._clock.pair().real_ns
        reason = f"log part {part.number} cannot be sealed: {problem}"
        with self._state:
            self._parts = [p for p in self._parts if p.number > part.number]
            self._add_losses(Loss("store", name, "log", reason, now, now, count) for name, count in part.rows.items())
        with contextlib.suppress(OSError):
            self._aside.move(part.path)
            self._corrupt_bytes = self._aside.bytes

    def _commit(self, edit: Edit) -> None:
        self._manifest.commit(replace(edit, drop=(*edit.drop, *self._gone)))
        self._gone.clear()
        self._problems.pop("manifest", None)
        kept = {self._root / path for path in self._manifest.state.segments}
        leftovers, self._leftovers = self._leftovers - kept, set()
        self._remove(leftovers)

    def _retain(self) -> None:
        with self._keeping:
            try:
                doomed = to_drop(
                    self._segments.values(),
                    self._limits,
                    self._clock.pair().real_ns,
                    self._other_bytes(),
                    self._files.free_bytes(self._root),
                )
                self._drop(doomed)
                if "manifest" in self._problems:
                    self._commit(Edit())
                full = self._over_limits(0)
            except OSError as e:
                self._problems["retention"] = f"old segments cannot be dropped: {e.strerror or e}"
                raise _store_error(e, self._root) from e
            self._problems.pop("retention", None)
            self._set_full(full)

    def _make_space(self, need: int) -> None:
        with contextlib.suppress(StoreError):
            self._retain()
        if self._full:
            raise StoreFull(f"the state directory {self._root} is at its limit: {self._over_limits(need)}")

    def _set_full(self, reason: str) -> None:
        self._full = bool(reason)
        if reason:
            self._problems["full"] = f"nothing is stored: {reason}"
        else:
            self._problems.pop("full", None)

    def _over_limits(self, need: int) -> str:
        used = sum(s.size for s in self._segments.values()) + self._other_bytes() + need
        free = self._files.free_bytes(self._root) - need
        if used > self._limits.max_bytes:
            return f"{used} bytes are used, max_bytes is {self._limits.max_bytes}"
        if free < self._limits.keep_free_bytes:
            return f"{free} bytes are free, keep_free_bytes is {self._limits.keep_free_bytes}"
        return ""

    def _drop_cold(self, need: int) -> bool:
        # The file system said that it is full, whatever it says of free space (a quota, reserved blocks).
        with self._keeping:
            limits = replace(self._limits, keep_free_bytes=0)
            doomed = to_drop(self._segments.values(), limits, self._clock.pair().real_ns, 0, 0, need)
            # The manifest needs space too: files go first, and their names with the next edit that can be written.
            self._gone.update(s.path for s in doomed)
            self._forget(doomed)
            try:
                self._commit(Edit())
            except OSError as e:
                self._problems["manifest"] = f"the manifest cannot be written: {e.strerror or e}"
            return bool(doomed)

    def _drop(self, doomed: Sequence[Segment]) -> None:
        if doomed:
            self._commit(Edit(drop=tuple(s.path for s in doomed)))
            self._forget(doomed)

    def _forget(self, doomed: Sequence[Segment]) -> None:
        with self._state:
            for segment in doomed:
                self._segments.pop(segment.path, None)
            self._counts["dropped_segments"] += len(doomed)
            self._counts["dropped_rows"] += sum(s.rows for s in doomed)
        self._remove(self._root / s.path for s in doomed)

    def _set_aside(self, segment: Segment, problem: str) -> None:
        self._gone.add(segment.path)
        with contextlib.suppress(OSError):
            self._commit(Edit())
        with contextlib.suppress(OSError):
            self._aside.move(self._root / segment.path)
            self._corrupt_bytes = self._aside.bytes
        reason = f"the segment {segment.path} is set aside: {problem}"
        with self._state:
            self._segments.pop(segment.path, None)
            self._add_losses(
                [Loss("store", segment.table, "store", reason, segment.ts_min, segment.ts_max, segment.rows)]
            )

    def _add_losses(self, losses: Iterable[Loss]) -> None:
        self._losses.extend(losses)
        del self._losses[:-_MAX_LOSSES]

    def _other_bytes(self) -> int:
        with self._state:
            parts = sum(p.length for p in self._parts) + (self._live.length if self._live else 0)
        return parts + self._corrupt_bytes

    def _remove(self, paths: Iterable[Path]) -> None:
        with self._state:
            free = self._leases.doom(paths)
        self._sweep(free)

    def _sweep(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not self._unlinked(path):
                with self._state:
                    self._leases.keep_doomed(path)

    def _unlinked(self, path: Path) -> bool:
        try:
            self._files.unlink(path)
        except OSError:
            return False
        return True

    def _start(self) -> None:
        for name, target in (("store-sync", self._sync_loop), ("store-maintain", self._maintain_loop)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _sync_loop(self) -> None:
        while not self._stop.wait(self._limits.sync_interval_s):
            # The reason is in the status, and the next round tries again.
            with contextlib.suppress(StoreError):
                self.sync()

    def _maintain_loop(self) -> None:
        while not self._stop.is_set():
            self._kick.wait(1.0)
            self._kick.clear()
            if self._stop.is_set():
                return
            try:
                self.maintain()
            except ProbingError as e:
                self._problems["maintain"] = e.message
            except pa.ArrowException as e:
                self._problems["maintain"] = str(InternalError(f"sealing failed: {e}"))
            else:
                self._problems.pop("maintain", None)


def _store_error(e: OSError, root: Path) -> StoreError:
    what = e.strerror or str(e)
    if e.errno in _NO_SPACE:
        return StoreFull(f"the state directory {root} is full: {what}")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "give it to the user that the collector runs as, or choose another --state-dir"
        return StoreError(f"the state directory {root} is not writable: {what}", hint=hint)
    return StoreError(f"the state directory {root} cannot be used: {what}", hint="look at the disk in the kernel log")
