"""The state of an open store: its parts and segments, the files that snapshots hold (leases), its counts and its
problems.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.log.parts import WAL_DIR, Part, part_number
from probing.daemon.store.manifest import Segment
from probing.daemon.store.status import StateStatus, status_by_table

__all__ = ("StoreState",)


class _Lease(NamedTuple):
    """The files that a snapshot holds. Log parts are held until ``sure_ns``. Segments are held until ``until_ns``, but
    only until ``sure_ns`` if space is short. Both times are monotonic.
    """

    sure_ns: int
    until_ns: int
    segments: frozenset[Path]
    parts: frozenset[Path]


class _Leases:
    """The files that snapshots hold. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._held: dict[int, _Lease] = {}
        self._doomed: set[Path] = set()
        self._generation = 0

    @property
    def count(self) -> int:
        """The number of snapshots that hold files."""
        return len(self._held)

    @property
    def doomed(self) -> frozenset[Path]:
        """The files to be removed: snapshots still hold them, or removing them failed."""
        return frozenset(self._doomed)

    def holds(self, path: Path) -> bool:
        """Returns whether a snapshot holds the file ``path``."""
        return any(path in lease.segments or path in lease.parts for lease in self._held.values())

    def take(self, lease: _Lease) -> int:
        """Holds the files of ``lease``. Returns the generation, which ``release`` needs."""
        self._generation += 1
        self._held[self._generation] = lease
        return self._generation

    def doom(self, paths: Iterable[Path]) -> list[Path]:
        """Marks ``paths`` to be removed. Returns all files that may be removed now."""
        self._doomed.update(paths)
        return self._free()

    def pardon(self, paths: Iterable[Path]) -> None:
        """Revokes the removal of ``paths``: new files were written under these names."""
        self._doomed.difference_update(paths)

    def keep_doomed(self, paths: Iterable[Path]) -> None:
        """Marks ``paths`` again to be removed, since removing them failed."""
        self._doomed.update(paths)

    def release(self, generation: int) -> list[Path]:
        """Ends a lease, if there is one. Returns all files that may be removed now."""
        self._held.pop(generation, None)
        return self._free()

    def expire(self, now_ns: int, *, short: bool) -> list[Path]:
        """Ends the leases whose time is over; ``short``: space is short. Returns all files that may be removed now."""
        for generation, lease in list(self._held.items()):
            if (lease.sure_ns if short else lease.until_ns) <= now_ns:
                del self._held[generation]
            elif lease.sure_ns <= now_ns:
                # A held log part keeps the segments with its rows from being merged, so log parts are released now. A
                # query reads log parts when it begins, so the query does not miss them.
                self._held[generation] = lease._replace(parts=frozenset())
        return self._free()

    def _free(self) -> list[Path]:
        # The loop runs over the files to be removed, because these are few, while many snapshots may hold thousands of
        # files.
        free = sorted(path for path in self._doomed if not self.holds(path))
        self._doomed.difference_update(free)
        return free


_MAX_LOSSES = 1000


class StoreState:
    """The state of an open store. Thread-safe.

    ``problems``: reasons by subject, empty while there are none. ``full``: appending is refused. ``set_aside_bytes``:
    the size of ``corrupt/``. ``merging_bytes``: the size of a merged segment while it is written. ``changes``: a
    counter of changes of the segments.
    """

    def __init__(self, files: Files, root: Path, parts: Iterable[Part], segments: Iterable[Segment]) -> None:
        self._files = files
        self._root = root
        self._lock = threading.Lock()
        self._live: Part | None = None
        self._closed = tuple(parts)
        self._segments = {segment.path: segment for segment in segments}
        self._leases = _Leases()
        # Sizes of dropped or merged segments whose files are still there: snapshots hold them, or removing them failed.
        self._held: dict[Path, int] = {}
        self._losses: list[Loss] = []
        self._records = self._rows = self._sealed_parts = 0
        self._dropped_segments = self._dropped_rows = 0
        self._merged_segments = self._merged_rows = 0
        self.problems: dict[str, str] = {}
        self.set_aside_bytes = 0
        self.merging_bytes = 0
        self.changes = 0
        self.full = False

    @property
    def closed_parts(self) -> tuple[Part, ...]:
        """Parts that get no more records and are not sealed yet, oldest first."""
        return self._closed

    @property
    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    @property
    def log_bytes(self) -> int:
        with self._lock:
            return sum(p.length for p in self._closed) + (self._live.length if self._live else 0)

    @property
    def other_bytes(self) -> int:
        """Bytes of all files other than segments and a merge in progress."""
        return self.log_bytes + self.set_aside_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of segments that were dropped or merged, but whose files a snapshot still holds."""
        with self._lock:
            return sum(size for path, size in self._held.items() if self._leases.holds(path))

    @property
    def first_part(self) -> int | None:
        """The first sealed log part whose file still exists: a snapshot holds it, or it could not be removed."""
        with self._lock:
            names = [path.name for path in self._leases.doomed if path.parent.name == WAL_DIR]
        return min(filter(None, map(part_number, names)), default=None)

    def segment(self, path: str) -> Segment | None:
        """Returns the segment at ``path``, relative to the state directory."""
        return self._segments.get(path)

    def appended(self, before: Part, after: Part) -> None:
        """Counts a record that was appended to the live part."""
        with self._lock:
            self._live = after
            self._records += 1
            self._rows += sum(after.rows.values()) - sum(before.rows.values())

    def part_closed(self, part: Part | None) -> None:
        """Makes the live part a closed part, which gets no more records. None: the part had no record and is
        removed.
        """
        with self._lock:
            self._live = None
            if part is not None:
                self._closed = (*self._closed, part)

    def sealed(self, parts: Sequence[Part], segments: Iterable[Segment], losses: Iterable[Loss]) -> None:
        """Replaces the closed parts, up to the last of ``parts``, by ``segments``, which have their rows."""
        with self._lock:
            self._add(segments)
            self._closed = tuple(p for p in self._closed if p.number > parts[-1].number)
            self._sealed_parts += len(parts)
        self.add_losses(losses)

    def dropped(self, segments: Sequence[Segment]) -> None:
        """Removes ``segments``, which retention dropped."""
        with self._lock:
            for segment in segments:
                self._segments.pop(segment.path, None)
            self.changes += 1
            self._hold(segments)
            self._dropped_segments += len(segments)
            self._dropped_rows += sum(s.rows for s in segments)

    def vanished(self, segments: Iterable[Segment], parts: Collection[Part]) -> None:
        """Removes ``segments`` and ``parts`` whose files another program has deleted."""
        with self._lock:
            for segment in segments:
                self._segments.pop(segment.path, None)
            self.changes += 1
            self._closed = tuple(p for p in self._closed if p not in parts)

    def set_aside(self, segment: Segment, rest: Segment | None) -> None:
        """Replaces the damaged ``segment`` by ``rest``, the segment of its good rows, or removes it."""
        with self._lock:
            self._segments.pop(segment.path, None)
            self._add([rest] if rest else ())

    def merged(self, sources: Sequence[Segment], segment: Segment) -> None:
        """Replaces ``sources`` by ``segment``, which has their rows."""
        with self._lock:
            for source in sources:
                self._segments.pop(source.path, None)
            self._hold(sources)
            self._add([segment])
            self._merged_segments += len(sources)
            self._merged_rows += segment.rows

    def add_losses(self, losses: Iterable[Loss]) -> None:
        """Keeps ``losses`` for ``take_losses``; beyond 1,000 the oldest are dropped."""
        with self._lock:
            self._losses.extend(losses)
            del self._losses[:-_MAX_LOSSES]

    def take_losses(self) -> list[Loss]:
        """Returns the losses since the last call."""
        with self._lock:
            losses, self._losses = self._losses, []
        return losses

    def lease(
        self, sure_ns: int, until_ns: int = 0, wanted: Callable[[Segment], bool] = lambda _: True
    ) -> tuple[int, list[Segment], list[Part]]:
        """Returns a generation, the ``wanted`` segments and the log parts with rows.

        Their files stay until the generation is released, but log parts at most until ``sure_ns`` (monotonic), and
        segments at most until ``until_ns`` if this is later and space allows.
        """
        with self._lock:
            parts = [p for p in (*self._closed, *([self._live] if self._live else [])) if p.rows]
            segments = [segment for segment in self._segments.values() if wanted(segment)]
            files = frozenset(self._root / s.path for s in segments), frozenset(p.path for p in parts)
            return self._leases.take(_Lease(sure_ns, max(sure_ns, until_ns), *files)), segments, parts

    def release(self, generation: int) -> None:
        with self._lock:
            free = self._leases.release(generation)
        self._unlink(free)

    def expire(self, now_ns: int, *, short: bool = False) -> None:
        """Releases the generations whose time (monotonic) is over. ``short``: space is short."""
        with self._lock:
            free = self._leases.expire(now_ns, short=short)
        self._unlink(free)

    def remove(self, paths: Iterable[Path]) -> None:
        """Unlinks files; if snapshots hold them, they are unlinked when the snapshots are released."""
        with self._lock:
            free = self._leases.doom(paths)
        self._unlink(free)

    def describe(self, other_problem: str = "") -> StateStatus:
        """Returns the status. ``other_problem`` counts like an entry of ``problems``."""
        with self._lock:
            segments = list(self._segments.values())
            parts = [*self._closed, *([self._live] if self._live else [])]
            leases, extra = self._leases.count, sum(self._held.values()) + self.merging_bytes
        problems = sorted({*self.problems.values(), other_problem} - {""})
        segment_bytes, log_bytes = sum(s.size for s in segments), sum(p.length for p in parts)
        return {
            "state": "degraded" if problems else "running",
            "reason": "; ".join(problems),
            "bytes": segment_bytes + log_bytes + self.set_aside_bytes + extra,
            "segment_bytes": segment_bytes,
            "log_bytes": log_bytes,
            "segments": len(segments),
            "parts": len(parts),
            "tables": status_by_table(segments),
            "leases": leases,
            "records": self._records,
            "rows": self._rows,
            "sealed_parts": self._sealed_parts,
            "dropped_segments": self._dropped_segments,
            "dropped_rows": self._dropped_rows,
            "merged_segments": self._merged_segments,
            "merged_rows": self._merged_rows,
        }

    def _add(self, segments: Iterable[Segment]) -> None:
        added = {s.path: s for s in segments}
        self._segments.update(added)
        self.changes += 1
        # An older, unused file of this name may be waiting to be removed.
        self._leases.pardon(self._root / path for path in added)

    def _hold(self, segments: Sequence[Segment]) -> None:
        self._held.update({self._root / s.path: s.size for s in segments})

    def _unlink(self, paths: Sequence[Path]) -> None:
        stuck = [path for path in paths if not self._unlinked(path)]
        if stuck:
            with self._lock:
                self._leases.keep_doomed(stuck)

    def _unlinked(self, path: Path) -> bool:
        try:
            self._files.unlink(path)
        except OSError:
            return False
        with self._lock:
            self._held.pop(path, None)
        return True
