"""Compaction: small segments that lie next to each other become one, a little at each turn.

Sealing leaves a segment a table every few seconds of load. Neighbours are merged once together they are many times the
largest of them, so that each row is written anew two or three times until its segment is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import Table
from probing.daemon.clock import Clock
from probing.daemon.store.files import Files
from probing.daemon.store.jobs.runner import Worker, WorkerFailed
from probing.daemon.store.limits import StoreLimits, TableLimits, merge_reserve
from probing.daemon.store.log.parts import WAL_DIR
from probing.daemon.store.maintenance.manifest_editor import NO_SPACE, Keeper
from probing.daemon.store.maintenance.merging import Merge
from probing.daemon.store.manifest import Segment
from probing.daemon.store.state import Inventory

__all__ = ("Compactor", "choose")

# A merged segment has at least so many times the bytes and rows of what it is made from: what a row costs is their
# logarithm. Rows count too, as the smallest files are mostly footer, and so many are twenty seconds of work.
_GROWTH = 10
_MAX_ROWS = 1 << 25
# Small ones that a merge takes at once; more are left to the next one.
_MAX_SOURCES = 64
# The same for a day that is over and no longer grows: what is left of it is tidied up.
_COLD_GROWTH = 2
_COLD_S = 3_600
_DAY_S = 86_400
# Of the limits of a table, what one segment may hold: retention takes whole ones.
_SHARE = 8
# Of each turn, and how long to rest when a merge could not be made, ns.
_TURN_NS = 500_000_000
_REST_NS = 60 * 1_000_000_000
# Segments whose merge fails the process so often in a row stay as they are.
_MAX_FAILURES = 3


class Compactor:
    """``turn`` and ``stop`` are called by one thread at a time; ``keeper`` edits the manifest."""

    def __init__(
        self,
        worker: Worker,
        files: Files,
        root: Path,
        clock: Clock,
        tables: Mapping[str, Table],
        inventory: Inventory,
        keeper: Keeper,
    ) -> None:
        self._worker = worker
        self._files = files
        self._root = root
        self._clock = clock
        self._tables = tables
        self._inventory = inventory
        self._keeper = keeper
        self._merge: Merge | None = None
        # Segments that are good and yet do not fit together; and until when nothing is tried, monotonic.
        self._unfit: set[str] = set()
        self._rest_until_ns = 0
        # Merges that ended or blocked the process, in a row.
        self._failures = 0

    def turn(self) -> int:
        """Go on with a merge, or begin one, for half a second; returns how many were finished.

        What fails is in the inventory's ``problems`` and is tried again later; no row depends on it.
        """
        start = self._clock.pair().mono_ns
        finished = 0
        try:
            while start >= self._rest_until_ns and self._begun():
                finished += self._step()
                if self._clock.pair().mono_ns - start >= _TURN_NS:
                    break
        except WorkerFailed as e:
            self._failures += not e.resting
            self._rest_until_ns = start + _REST_NS
            if self._failures < _MAX_FAILURES:
                self.stop()
            else:
                self._failures = 0
                self._doubt(str(e))
        except (FormatError, FileNotFoundError, pa.ArrowException) as e:
            self._doubt(str(e))
        except OSError as e:
            self._rest_until_ns = start + _REST_NS
            if e.errno not in NO_SPACE:
                self._inventory.problems["compaction"] = f"segments cannot be merged: {e.strerror or e}"
            self.stop()
        return finished

    def stop(self) -> None:
        """Give up the merge that is under way, and remove what it has written."""
        merge, self._merge = self._merge, None
        self._inventory.merging_bytes = 0
        if merge is not None:
            with contextlib.suppress(OSError):
                merge.abort()

    def _begun(self) -> bool:
        merge = self._merge
        if merge is not None:
            # Retention and damage take segments at any time, and others the space.
            there = all(self._inventory.segment(s.path) is s for s in merge.sources)
            if there and self._keeper.room() >= _size(merge.sources) - merge.written:
                return True
            self.stop()
        inventory, now = self._inventory, self._clock.pair().real_ns
        sources = choose(inventory.segments, self._keeper.limits, now, inventory.first_part, self._unfit)
        if not sources or self._keeper.room() < _size(sources):
            return False
        self._merge = Merge(self._worker, self._files, self._root, sources, self._tables.get(sources[0].table))
        return True

    def _step(self) -> int:
        merge = self._merge
        assert merge is not None
        merged = merge.step()
        self._inventory.merging_bytes = merge.written
        if merged is None:
            return 0
        # A log part that comes back with a power cut would look as if its rows were not sealed yet.
        self._files.fsync_dir(self._root / WAL_DIR)
        self._merge = None
        self._failures = 0
        self._inventory.merging_bytes = 0
        self._inventory.problems.pop("compaction", None)
        return int(self._keeper.replace(merge.sources, merged))

    def _doubt(self, reason: str) -> None:
        sources = self._merge.sources if self._merge else ()
        self.stop()
        # The damaged ones are set aside, and the others are neighbours then.
        bad = [s for s in sources if self._keeper.quarantine(s.path, reason)]
        known = {s.path for s in self._inventory.segments}
        if not bad and known.issuperset(s.path for s in sources):
            self._unfit.update(s.path for s in sources)
        self._unfit &= known


def choose(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, first_part: int | None, unfit: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Neighbours to merge, in order; empty when nothing is worth it.

    ``now_ns`` is UTC; ``first_part`` the first log part that there is still a file of: what comes from it or later ones
    is not merged, so that a start can tell which log parts a segment stands for. ``unfit``: paths to leave out.
    """
    folders: dict[str, list[Segment]] = {}
    for segment in segments:
        folders.setdefault(segment.path.rsplit("/", 1)[0], []).append(segment)
    # Where most lie about, first.
    for found in sorted(folders.values(), key=len, reverse=True):
        own = limits.tables.get(found[0].table, TableLimits())
        most = _most_bytes(limits, own)
        span = _most_ns(limits, own)
        growth = _COLD_GROWTH if _is_over(found[0].path, now_ns) else _GROWTH
        for stretch in _stretches(found, most, first_part, unfit):
            for start in range(len(stretch)):
                run = _run(stretch[start : start + _MAX_SOURCES], most, span, growth)
                if run:
                    return tuple(run)
    return ()


def _most_bytes(limits: StoreLimits, own: TableLimits) -> int:
    most = min(limits.segment_bytes, merge_reserve(limits))
    return most if own.max_bytes is None else min(most, own.max_bytes // _SHARE)


def _most_ns(limits: StoreLimits, own: TableLimits) -> int:
    age_s = limits.max_age_s if own.max_age_s is None else min(limits.max_age_s, own.max_age_s)
    return int(age_s * 1e9) // _SHARE


def _stretches(
    segments: Iterable[Segment], most: int, first_part: int | None, unfit: Collection[str]
) -> Iterator[list[Segment]]:
    """Those between others that stay as they are: full ones above all."""
    stretch: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.parts):
        in_log = first_part is not None and segment.parts[1] >= first_part
        full = segment.size * 2 > most or segment.rows * 2 > _MAX_ROWS
        if not (full or in_log or segment.path in unfit):
            stretch.append(segment)
            continue
        yield stretch
        stretch = []
    yield stretch


def _run(stretch: Sequence[Segment], most: int, span_ns: int, growth: int) -> list[Segment]:
    """The longest run worth a merge that begins with the first one; empty when there is none."""
    best = size = rows = largest = longest = 0
    since, until = stretch[0].ts_min, stretch[0].ts_max
    for count, segment in enumerate(stretch, 1):
        since, until = min(since, segment.ts_min), max(until, segment.ts_max)
        size, largest = size + segment.size, max(largest, segment.size)
        rows, longest = rows + segment.rows, max(longest, segment.rows)
        if size > most or rows > _MAX_ROWS or (count > 1 and until - since > span_ns):
            break
        # Quarters of a full one may make one at once.
        full = (size * 2 > most and largest * 4 <= most) or (rows * 2 > _MAX_ROWS and longest * 4 <= _MAX_ROWS)
        if count > 1 and (full or (size >= largest * growth and rows >= longest * growth)):
            best = count
    return list(stretch[:best])


def _is_over(path: str, now_ns: int) -> bool:
    try:
        day = datetime.strptime(path.split("/")[1], "date=%Y-%m-%d").replace(tzinfo=timezone.utc)
    except (IndexError, ValueError):
        return False
    return (day.timestamp() + _DAY_S + _COLD_S) * 1e9 < now_ns


def _size(segments: Iterable[Segment]) -> int:
    return sum(s.size for s in segments)
