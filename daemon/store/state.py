"""What the store has at this moment: parts, segments, who reads them, and how it is doing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.log.parts import WAL_DIR, Part, part_number
from probing.daemon.store.manifest import Segment
from probing.daemon.store.recovery.recover import Recovered
from probing.daemon.store.snapshot import Leases

__all__ = ("Inventory",)

_MAX_LOSSES = 1000


class Inventory:
    """Safe to call from any thread. ``problems``: {what: why}, empty while all is well; ``set_aside_bytes`` and
    ``full`` (appending is refused) are written by the keeper alone, ``merging_bytes`` (of a segment that is not
    finished) by the compactor."""

    def __init__(self, files: Files, root: Path, found: Recovered, set_aside_bytes: int) -> None:
        self._files = files
        self._root = root
        self._lock = threading.Lock()
        self._live: Part | None = None
        self._closed = tuple(found.parts)
        self._segments = dict(found.manifest.state.segments)
        self._leases = Leases()
        # Bytes of segments that are to go and are still held.
        self._held: dict[Path, int] = {}
        self._losses: list[Loss] = []
        self._counts = {"records": 0, "rows": 0, "sealed_parts": 0, "dropped_segments": 0, "dropped_rows": 0}
        self._counts |= {"merged_segments": 0, "merged_rows": 0}
        self.problems: dict[str, str] = {"manifest": found.degraded} if found.degraded else {}
        self.set_aside_bytes = set_aside_bytes
        self.merging_bytes = 0
        self.full = False

    @property
    def closed_parts(self) -> tuple[Part, ...]:
        """Parts that nothing is appended to and that are not sealed, oldest first."""
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
        """What is used besides segments, but for what merging takes for a while."""
        return self.log_bytes + self.set_aside_bytes

    @property
    def held_bytes(self) -> int:
        """Of segments that are dropped or merged and go when no snapshot names them."""
        with self._lock:
            return sum(self._held.values())

    @property
    def first_part(self) -> int | None:
        """The first sealed log part that is still there, because a snapshot names it or it could not be removed."""
        with self._lock:
            names = [path.name for path in self._leases.doomed if path.parent.name == WAL_DIR]
        return min(filter(None, map(part_number, names)), default=None)

    def segment(self, path: str) -> Segment | None:
        """By its path relative to the state directory."""
        return self._segments.get(path)

    def appended(self, before: Part, after: Part) -> None:
        with self._lock:
            self._live = after
            self._counts["records"] += 1
            self._counts["rows"] += sum(after.rows.values()) - sum(before.rows.values())

    def part_closed(self, part: Part | None) -> None:
        """The live part takes no more records; None: it has none, and is no part."""
        with self._lock:
            self._live = None
            if part is not None:
                self._closed = (*self._closed, part)

    def sealed(self, parts: Sequence[Part], segments: Iterable[Segment], losses: Iterable[Loss]) -> None:
        """All closed parts up to the last of ``parts`` are ``segments`` now."""
        with self._lock:
            self._add(segments)
            self._closed = tuple(p for p in self._closed if p.number > parts[-1].number)
            self._counts["sealed_parts"] += len(parts)
        self.add_losses(losses)

    def dropped(self, segments: Sequence[Segment]) -> None:
        """``segments`` were taken by retention."""
        with self._lock:
            for segment in segments:
                self._segments.pop(segment.path, None)
            self._hold(segments)
            self._counts["dropped_segments"] += len(segments)
            self._counts["dropped_rows"] += sum(s.rows for s in segments)

    def vanished(self, segments: Iterable[Segment], parts: Collection[Part]) -> None:
        """The files of these are gone."""
        with self._lock:
            for segment in segments:
                self._segments.pop(segment.path, None)
            self._closed = tuple(p for p in self._closed if p not in parts)

    def set_aside(self, segment: Segment, rest: Segment | None) -> None:
        """``segment`` is damaged; its good rows are in ``rest``, if it has any."""
        with self._lock:
            self._segments.pop(segment.path, None)
            self._add([rest] if rest else ())

    def merged(self, sources: Sequence[Segment], segment: Segment) -> None:
        """The rows of ``sources`` are in ``segment`` now."""
        with self._lock:
            for source in sources:
                self._segments.pop(source.path, None)
            self._hold(sources)
            self._add([segment])
            self._counts["merged_segments"] += len(sources)
            self._counts["merged_rows"] += segment.rows

    def add_losses(self, losses: Iterable[Loss]) -> None:
        with self._lock:
            self._losses.extend(losses)
            del self._losses[:-_MAX_LOSSES]

    def take_losses(self) -> list[Loss]:
        with self._lock:
            losses, self._losses = self._losses, []
        return losses

    def lease(
        self, until_ns: int, wanted: Callable[[Segment], bool] = lambda _: True
    ) -> tuple[int, list[Segment], list[Part]]:
        """A generation, and what its reader may read until it is released or ``until_ns`` (monotonic) is past: of the
        segments those that are ``wanted``."""
        with self._lock:
            parts = [p for p in (*self._closed, *([self._live] if self._live else [])) if p.rows]
            segments = [segment for segment in self._segments.values() if wanted(segment)]
            names = {self._root / s.path for s in segments} | {p.path for p in parts}
            return self._leases.take(names, until_ns), segments, parts

    def release(self, generation: int) -> None:
        with self._lock:
            free = self._leases.release(generation)
        self._unlink(free)

    def expire(self, now_ns: int) -> None:
        with self._lock:
            free = self._leases.expire(now_ns)
        self._unlink(free)

    def remove(self, paths: Iterable[Path]) -> None:
        """Unlink files, those that a snapshot names once it is released."""
        with self._lock:
            free = self._leases.doom(paths)
        self._unlink(free)

    def describe(self, other_problem: str = "") -> dict[str, Any]:
        """The status of the store, JSON-able."""
        with self._lock:
            segments = list(self._segments.values())
            parts = [*self._closed, *([self._live] if self._live else [])]
            counts, leases = dict(self._counts), self._leases.count
            extra = sum(self._held.values()) + self.merging_bytes
        tables: dict[str, dict[str, int]] = {}
        for s in segments:
            own = tables.setdefault(s.table, {"segments": 0, "bytes": 0, "rows": 0, "ts_min": s.ts_min})
            own["segments"] += 1
            own["bytes"] += s.size
            own["rows"] += s.rows
            own["ts_min"] = min(own["ts_min"], s.ts_min)
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
            "tables": tables,
            "leases": leases,
            **counts,
        }

    def _add(self, segments: Iterable[Segment]) -> None:
        added = {s.path: s for s in segments}
        self._segments.update(added)
        # An older file of that name, never in use, may have been one to remove.
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
