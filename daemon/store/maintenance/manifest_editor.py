"""All that edits the manifest: sealing, retention, setting aside, and what compaction puts in place."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError, StoreError, StoreFull
from probing.api.tables import Table
from probing.daemon.clock import Clock
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.jobs.runner import Worker, WorkerFailed
from probing.daemon.store.limits import DEFAULT_FREE_BYTES, StoreLimits, on_file_system
from probing.daemon.store.log.parts import WAL_DIR, Part
from probing.daemon.store.maintenance.ageing import AgeClock
from probing.daemon.store.maintenance.retention import to_drop
from probing.daemon.store.maintenance.salvaging import Salvaged, salvage
from probing.daemon.store.maintenance.sealing import Sealed, group_parts, seal_parts
from probing.daemon.store.manifest import MANIFEST, Edit, Manifest, Segment
from probing.daemon.store.recovery.recover import SetAside
from probing.daemon.store.segments.reader import check_segment
from probing.daemon.store.state import Inventory

__all__ = ("NO_SPACE", "Keeper", "store_error")

_log = logging.getLogger(__name__)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_MAX_CLOSED_PARTS = 16
# Merging waits while so many parts wait to be sealed.
_BEHIND_PARTS = 3
_SCRUB_INTERVAL_NS = 24 * 3_600 * 1_000_000_000
# What is read at each turn to check segments, on average.
_SCRUB_BYTES = 16 << 20
# Of max_bytes, what may lie in corrupt/.
_ASIDE_SHARE = 20


class Keeper:
    """Safe to call from any thread. What fails is in ``inventory.problems`` until it works again."""

    def __init__(
        self,
        worker: Worker,
        files: Files,
        root: Path,
        clock: Clock,
        limits: StoreLimits,
        tables: Mapping[str, Table],
        inventory: Inventory,
        manifest: Manifest,
        aside: SetAside,
    ) -> None:
        self._worker = worker
        self._files = files
        self._root = root
        self._clock = clock
        self._limits = limits
        self._tables = tables
        self._inventory = inventory
        self._manifest = manifest
        self._aside = aside
        self._sealing = threading.Lock()
        self._lock = threading.RLock()
        # Files that may be there and that the manifest does not name, and names in it whose files are gone.
        self._leftovers: set[Path] = set()
        self._gone: set[str] = set()
        self._unverified = deque(s.path for s in inventory.segments)
        self._scrubbed_ns = clock.pair().mono_ns
        self._scrub_bytes = 0
        self._age = AgeClock(inventory.segments, clock.pair())
        self.set_limits(limits)

    @property
    def limits(self) -> StoreLimits:
        return self._limits

    def set_limits(self, limits: StoreLimits) -> None:
        """They hold from the next turn on."""
        with self._lock:
            self._asked = limits
            self._limits = self._on_disk(limits)
            with contextlib.suppress(OSError):
                self._aside.limit(limits.max_bytes // _ASIDE_SHARE)
                self._inventory.set_aside_bytes = self._aside.bytes

    @property
    def is_behind(self) -> bool:
        """Whether the log grows faster than it is sealed."""
        return sum(p.raw_bytes for p in self._inventory.closed_parts) >= _BEHIND_PARTS * self._limits.part_bytes

    def seal(self, now: bool) -> int:
        """See ``Store.seal``; of closed parts."""
        with self._sealing:
            parts = self._inventory.closed_parts
            enough = sum(p.raw_bytes for p in parts) >= self._limits.part_bytes or len(parts) >= _MAX_CLOSED_PARTS
            if not parts or not (now or enough):
                return 0
            try:
                for group in group_parts(parts):
                    self._seal_group(group)
            except OSError as e:
                self._inventory.problems["seal"] = f"log parts cannot be sealed: {e.strerror or e}"
                if e.errno in NO_SPACE:
                    self.drop_cold(self._limits.part_bytes)
                raise store_error(e, self._root) from e
            self._inventory.problems.pop("seal", None)
            return len(parts)

    def retain(self) -> None:
        """Drop what is too old or too much, and find out whether there is space to append. Raises StoreError."""
        inventory = self._inventory
        with self._lock:
            try:
                # What snapshots hold is as good as free: else each turn would drop as much again.
                free = self._files.space(self._root)[0] + inventory.held_bytes
                self._limits = self._on_disk(self._asked)
                now = self._age.now(self._clock.pair())
                self._drop(to_drop(inventory.segments, self._limits, now, inventory.other_bytes, free))
                if "manifest" in inventory.problems:
                    self._commit(Edit())
                full = self.over_limits()
            except OSError as e:
                inventory.problems["retention"] = f"old segments cannot be dropped: {e.strerror or e}"
                raise store_error(e, self._root) from e
            inventory.problems.pop("retention", None)
            self._note_full(full)

    def _on_disk(self, limits: StoreLimits) -> StoreLimits:
        size = DEFAULT_FREE_BYTES * 10
        with contextlib.suppress(OSError):
            size = self._files.space(self._root)[1]
        return on_file_system(limits, size)

    def _note_full(self, full: str) -> None:
        inventory = self._inventory
        if full and not inventory.full:
            _log.warning("nothing is stored: %s", full)
        elif inventory.full and not full:
            _log.info("there is space again: rows are stored")
        inventory.problems.pop("full", None)
        inventory.full = bool(full)
        if full:
            inventory.problems["full"] = f"nothing is stored: {full}"

    def check_space(self) -> None:
        """Find out whether there is space to append; nothing is dropped. Raises StoreError."""
        try:
            self._note_full(self.over_limits())
        except OSError as e:
            raise store_error(e, self._root) from e

    def is_gone(self) -> bool:
        """Whether somebody deleted the state directory, or what is needed to go on in it."""
        names = self._files.listdir(self._root)
        # On a full disk there may be no manifest yet.
        return WAL_DIR not in names or (MANIFEST not in names and "manifest" not in self._inventory.problems)

    def remake(self) -> None:
        """Write the manifest anew, without the files that are gone: their rows are losses. Raises OSError."""
        with self._lock:
            now = self._clock.pair().real_ns
            segments = [s for s in self._inventory.segments if self._is_missing(self._root / s.path)]
            parts = [p for p in self._inventory.closed_parts if self._is_missing(p.path)]
            self._manifest.close()
            self._gone.update(s.path for s in segments)
            self._commit(Edit())
            self._inventory.vanished(segments, parts)
        losses = list(_losses_of(segments, parts, now))
        self._inventory.add_losses(losses)
        rows = sum(loss.count or 0 for loss in losses)
        _log.error("the state directory %s was deleted: it is made again, %d rows are lost", self._root, rows)

    def _is_missing(self, path: Path) -> bool:
        try:
            self._files.size(path)
        except OSError:
            return True
        return False

    def over_limits(self) -> str:
        """Why nothing may be appended now; empty when it may. Raises OSError."""
        used, (free, _) = self._used(), self._files.space(self._root)
        if used > self._limits.max_bytes:
            return f"{used} bytes are used, max_bytes is {self._limits.max_bytes}"
        if free < self._limits.keep_free_bytes:
            return f"{free} bytes are free, keep_free_bytes is {self._limits.keep_free_bytes}"
        return ""

    def room(self) -> int:
        """Bytes that a merge may take without getting near a limit; below 0 when there are none. Raises OSError."""
        limits = self._limits
        room = limits.max_bytes - self._used() - self._inventory.held_bytes
        return min(room, self._files.space(self._root)[0] - limits.keep_free_bytes - limits.part_bytes)

    def replace(self, sources: Sequence[Segment], merged: Segment) -> bool:
        """One edit: ``merged`` instead of ``sources``. False when one of them is gone meanwhile; then ``merged`` goes.

        Raises OSError; then ``merged`` goes once it is sure that the manifest does not name it.
        """
        with self._lock:
            self._leftovers.add(self._root / merged.path)
            there = all(self._inventory.segment(s.path) is s for s in sources)
            # One that could not be put in place before has the same name, and may have been removed just now.
            if not there or self._files.size(self._root / merged.path) != merged.size:
                self._try_commit()
                return False
            self._commit(Edit((merged,), tuple(s.path for s in sources)))
            self._inventory.merged(sources, merged)
        self._inventory.remove(self._root / s.path for s in sources)
        return True

    def drop_cold(self, need: int) -> bool:
        """The file system said that it is full, whatever it says of free space (a quota, reserved blocks): drop the
        oldest ``need`` bytes. False when there is nothing to drop."""
        inventory = self._inventory
        with self._lock:
            limits = replace(self._limits, keep_free_bytes=0)
            doomed = to_drop(inventory.segments, limits, self._age.now(self._clock.pair()), 0, 0, need)
            # The manifest needs space too: files go first, and their names with the next edit that can be written.
            self._gone.update(s.path for s in doomed)
            self._forget(doomed)
            self._try_commit()
            return bool(doomed)

    def verify(self) -> list[str]:
        """See ``Store.verify``."""
        paths = [s.path for s in self._inventory.segments]
        return [f"{path}: {problem}" for path in paths if (problem := self.quarantine(path, ""))]

    def scrub(self) -> None:
        """Check a segment, when one is due."""
        with self._lock:
            now = self._clock.pair().mono_ns
            if not self._unverified and now - self._scrubbed_ns > _SCRUB_INTERVAL_NS:
                self._unverified, self._scrubbed_ns = deque(s.path for s in self._inventory.segments), now
            segment = self._inventory.segment(self._unverified[0]) if self._unverified else None
            self._scrub_bytes = _SCRUB_BYTES + min(self._scrub_bytes, segment.size if segment else 0)
            if not self._unverified or (segment and segment.size > self._scrub_bytes):
                return
            self._scrub_bytes = 0
            path = self._unverified.popleft()
        self.quarantine(path, "")

    def quarantine(self, path: str, reason: str) -> str:
        """Set the segment ``path`` aside if it is bad, with the ``reason`` it was suspected for; says why it is bad."""
        segment = self._inventory.segment(path)
        # Without the lock: it can be large.
        problem = check_segment(self._files, self._root, segment) if segment else ""
        if not problem or segment is None:
            return ""
        known = f"{problem} ({reason})" if reason else problem
        try:
            salvaged = salvage(self._worker, self._files, self._root, segment, known)
        except (OSError, WorkerFailed) as e:
            self._inventory.problems["salvage"] = f"the segment {path} is damaged, and set aside later: {e}"
            with self._lock:
                self._unverified.append(path)
            return problem
        self._inventory.problems.pop("salvage", None)
        with self._lock:
            self._leftovers |= salvaged.written
            # Meanwhile it may have been dropped, or merged with others.
            if self._inventory.segment(path) is not segment:
                self._try_commit()
                return ""
            self._set_aside(segment, salvaged)
            return problem

    def close(self) -> None:
        with self._lock:
            self._manifest.close()

    def _used(self) -> int:
        inventory = self._inventory
        return sum(s.size for s in inventory.segments) + inventory.other_bytes + inventory.merging_bytes

    def _seal_group(self, group: list[Part]) -> None:
        sealed = Sealed()
        try:
            # Without the lock: whoever appends may wait for that, and this can take long.
            now = self._clock.pair().real_ns
            seal_parts(self._worker, self._files, self._root, group, now, self._tables, sealed)
        except (pa.ArrowException, FormatError) as e:
            # One part that cannot be sealed must not keep all later ones in the log.
            if len(group) == 1:
                self._give_up(group[0], str(e))
                return
            for part in group:
                self._seal_group([part])
            return
        finally:
            with self._lock:
                self._leftovers |= sealed.written
        with self._lock:
            self._commit(_sealed_edit(group[-1], sealed.segments))
            self._inventory.sealed(group, sealed.segments, sealed.losses)
        self._inventory.remove(p.path for p in group)

    def _give_up(self, part: Part, problem: str) -> None:
        self._commit(_sealed_edit(part, ()))
        now = self._clock.pair().real_ns
        reason = f"log part {part.number} cannot be sealed: {problem}"
        losses = [Loss("store", name, "log", reason, now, now, count) for name, count in part.rows.items()]
        self._inventory.sealed([part], (), losses)
        self._move_aside(part.path)

    def _set_aside(self, segment: Segment, salvaged: Salvaged) -> None:
        self._gone.add(segment.path)
        rest = salvaged.segment
        try:
            self._commit(Edit((rest,)) if rest else Edit())
        except OSError as e:
            self._unwritten(e)
            if rest:
                # Its rows are in no manifest: it is found again as one to set aside.
                self._gone.discard(segment.path)
                return
        self._inventory.set_aside(segment, rest)
        self._move_aside(self._root / segment.path)
        self._inventory.add_losses(salvaged.losses)

    def _move_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._aside.move(path)
            self._inventory.set_aside_bytes = self._aside.bytes

    def _commit(self, edit: Edit) -> None:
        self._manifest.commit(replace(edit, drop=(*edit.drop, *self._gone)))
        self._gone.clear()
        self._inventory.problems.pop("manifest", None)
        kept = {self._root / path for path in self._manifest.state.segments}
        leftovers, self._leftovers = self._leftovers - kept, set()
        self._inventory.remove(leftovers)

    def _try_commit(self) -> None:
        # What is in _gone goes with the next edit that succeeds; retain() sees to it that there is one.
        try:
            self._commit(Edit())
        except OSError as e:
            self._unwritten(e)

    def _unwritten(self, e: OSError) -> None:
        self._inventory.problems["manifest"] = f"the manifest cannot be written: {e.strerror or e}"

    def _drop(self, doomed: Sequence[Segment]) -> None:
        if doomed:
            self._commit(Edit(drop=tuple(s.path for s in doomed)))
            self._forget(doomed)

    def _forget(self, doomed: Sequence[Segment]) -> None:
        self._inventory.dropped(doomed)
        self._inventory.remove(self._root / s.path for s in doomed)


def _sealed_edit(last: Part, segments: Sequence[Segment]) -> Edit:
    return Edit(tuple(segments), sealed_to=last.number, next_sequence=last.next_sequence, positions=last.positions)


def _losses_of(segments: Sequence[Segment], parts: Sequence[Part], now: int) -> Iterator[Loss]:
    reason = "the state directory was deleted"
    for table in sorted({s.table for s in segments}):
        of_it = [s for s in segments if s.table == table]
        first, last = min(s.ts_min for s in of_it), max(s.ts_max for s in of_it)
        yield Loss("store", table, "store", reason, first, last, sum(s.rows for s in of_it))
    for part in parts:
        for table, count in part.rows.items():
            yield Loss("store", table, "log", f"log part {part.number}: {reason}", now, now, count)


def store_error(e: OSError, root: Path) -> StoreError:
    """What an error of the file system means for who runs the daemon."""
    what = e.strerror or str(e)
    if e.errno in NO_SPACE:
        return StoreFull(f"the state directory {root} is full: {what}")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "give it to the user that the collector runs as, or choose another --state-dir"
        return StoreError(f"the state directory {root} is not writable: {what}", hint=hint)
    return StoreError(f"the state directory {root} cannot be used: {what}", hint="look at the disk in the kernel log")
