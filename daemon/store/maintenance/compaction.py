"""Compaction: chooses small neighbouring segments and merges them, for a short time in each round of maintenance.

Under load, sealing makes a segment of each table every few seconds. Neighbours are merged once their total size is many
times the size of the largest of them. So each row is rewritten two or three times until its segment is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.context import StoreContext
from probing.daemon.store.files import NO_SPACE
from probing.daemon.store.limits import StoreLimits, TableLimits, merge_reserve
from probing.daemon.store.log.parts import WAL_DIR
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.quarantine import Quarantine
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.contents import all_jobs
from probing.daemon.store.segments.files import SegmentFile, segment_path
from probing.daemon.store.tasks.messages import Data, Made, Step
from probing.daemon.store.tasks.worker import Task, WorkerFailed

__all__ = (
    "Compactor",
    "choose",
)

# A merged segment has at least this many times the bytes and rows of its largest source, so that a row is rewritten
# only as often as the logarithm of the segment's size. Rows count, too, because the smallest files are mostly footer.
_GROWTH = 10
# The maximum number of rows in a merged segment: merging them takes about twenty seconds.
_MAX_ROWS = 1 << 25
# The maximum number of sources of one merge; the next merge gets the rest.
_MAX_SOURCES = 64
# Replaces _GROWTH for a day that is over, so that its last small segments are merged as well.
_COLD_GROWTH = 2
_COLD_S = 3_600
_DAY_S = 86_400
# A merged segment may use at most 1/_SHARE of its table's limits, because retention drops whole segments.
_SHARE = 8


def choose(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, first_part: int | None, unfit: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Returns neighbours to merge, in order; empty when no merge is worth its cost.

    ``now_ns`` is UTC. ``first_part`` is the first sealed log part whose file still exists: segments with rows of this
    part or of later parts are not merged, so that the next start knows which log parts a segment replaces. ``unfit``:
    paths to leave out.
    """
    folders: dict[str, list[Segment]] = {}
    for segment in segments:
        folders.setdefault(segment.path.rsplit("/", 1)[0], []).append(segment)
    # The folders with the most segments come first.
    for folder in sorted(folders.values(), key=len, reverse=True):
        own = limits.tables.get(folder[0].table, TableLimits())
        most = _most_bytes(limits, own)
        span = _most_ns(limits, own)
        growth = _COLD_GROWTH if _is_over(folder[0].path, now_ns) else _GROWTH
        for stretch in _stretches(folder, most, first_part, unfit):
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
    """Yields sequences of neighbours that may be merged. Segments that stay as they are, mostly full ones, separate the
    sequences.
    """
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
    """Returns the longest sequence of segments that starts with the first segment and is worth a merge; empty if there
    is none.
    """
    best = size = rows = largest = longest = 0
    since, until = stretch[0].ts_min, stretch[0].ts_max
    for count, segment in enumerate(stretch, 1):
        since, until = min(since, segment.ts_min), max(until, segment.ts_max)
        size, largest = size + segment.size, max(largest, segment.size)
        rows, longest = rows + segment.rows, max(longest, segment.rows)
        if size > most or rows > _MAX_ROWS or (count > 1 and until - since > span_ns):
            break
        # A merge that makes a full segment is worth its cost even below ``growth``, if each source has at most a
        # quarter of the maximum size.
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


class _Merge:
    """Merges ``sources``, segments of one table and date that are consecutive in ``parts``.

    Each row group has the rows of consecutive log parts in the table's order, so the statistics of the row group cover
    as little time as the statistics of the sources. After an error only ``abort`` may be called.
    """

    def __init__(self, context: StoreContext, sources: Sequence[Segment]) -> None:
        self.sources = tuple(sources)
        # The bytes of the new segment so far.
        self.written = 0
        self._context = context
        self._task: Task | None = None
        self._file: SegmentFile | None = None
        self._made: Made | None = None

    @property
    def _parts(self) -> tuple[int, int]:
        return self.sources[0].parts[0], self.sources[-1].parts[1]

    def step(self) -> Segment | None:
        """Merges one more row group. Returns the new segment, renamed and synced, after the last row group; else None.

        Raises FormatError when a source is damaged or the sources do not fit together, OSError, WorkerFailed.
        """
        task = self._task = self._task or self._begin()
        try:
            for step in task.turn():
                self._take(step)
        except (pa.ArrowException, OSError) as e:
            if getattr(e, "errno", None) is not None:
                raise
            raise FormatError(f"{self.sources[0].path} and its neighbours cannot be merged: {e}") from e
        return self._finish() if task.done else None

    def abort(self) -> None:
        """Ends the task and removes the unfinished file. Raises OSError."""
        task, self._task = self._task, None
        file, self._file = self._file, None
        if task is not None:
            task.close()
        if file is not None:
            file.abort()

    def _begin(self) -> Task:
        name = self.sources[0].table
        table = self._context.tables.get(name)
        physical = table.physical if table else pa.schema([])
        return self._context.worker.start(
            "merge",
            [(self._context.root / source.path, source.size) for source in self.sources],
            table=name,
            sort_by=list(table.sort_by if table else ("ts",)),
            coded=[f.name for f in physical if isinstance(f.type, pa.DictionaryType)],
            expected=[[source.path, source.size, source.crc] for source in self.sources],
        )

    def _take(self, step: Step) -> None:
        if isinstance(step, Made):
            self._made = step
            return
        if not isinstance(step, Data):
            raise FormatError(f"a merging task sent an unexpected message: {type(step).__name__}")
        if self._file is None:
            date = self.sources[0].path.split("/")[1].removeprefix("date=")
            path = segment_path(self.sources[0].table, date, self._parts)
            self._file = SegmentFile(self._context.files, self._context.root, path, self._context.synced)
        self._file.write(step.data)
        self.written = self._file.size

    def _finish(self) -> Segment:
        made, file, rows = self._made, self._file, sum(s.rows for s in self.sources)
        if made is None or file is None or made.rows != rows:
            had = made.rows if made else "no"
            raise FormatError(f"{self.sources[0].path} and its neighbours gave {had} rows instead of {rows}")
        file.finish(made.size, made.crc, set())
        self._file = None
        first, last = min(s.ts_min for s in self.sources), max(s.ts_max for s in self.sources)
        return Segment(
            self.sources[0].table,
            file.path,
            made.size,
            made.crc,
            rows,
            first,
            last,
            self._parts,
            all_jobs(self.sources),
        )


# After this time, ns, ``turn`` starts no further step of a merge.
_TURN_NS = 500_000_000
# The pause after a merge that failed, ns.
_REST_NS = 60 * 1_000_000_000
# The interval of searches for segments to merge while nothing changes, ns. A search takes 12 ms for 3,000 segments.
_SEARCH_NS = 60 * 1_000_000_000
# The number of consecutive failures in the worker after which the segments of the merge are checked. If all segments
# are good, no later merge uses them.
_MAX_FAILURES = 3


class Compactor:
    """Merges segments. ``turn`` and ``stop`` are called by one thread at a time."""

    def __init__(self, context: StoreContext, editor: ManifestEditor, space: Space, quarantine: Quarantine) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._space = space
        self._quarantine = quarantine
        self._merge: _Merge | None = None
        # Paths of good segments that do not fit together.
        self._unfit: set[str] = set()
        # No merge is tried before this time, CLOCK_MONOTONIC ns.
        self._rest_until_ns = 0
        # The inputs of the last search if it found nothing. With the same inputs the search is not repeated.
        self._nothing: object = None
        # The number of consecutive merges that crashed or hung the worker process.
        self._failures = 0

    def turn(self) -> int:
        """Merges for half a second; returns the number of finished merges.

        A failed merge loses no row. Merging is tried again later; an OSError, unless the disk is full, is in the
        state's ``problems`` until a merge succeeds.
        """
        start = self._context.clock.pair().mono_ns
        finished = 0
        try:
            while start >= self._rest_until_ns and self._has_merge():
                finished += self._step()
                if self._context.clock.pair().mono_ns - start >= _TURN_NS:
                    break
        except WorkerFailed as e:
            self._failures += not e.resting
            self._rest_until_ns = start + _REST_NS
            if self._failures < _MAX_FAILURES:
                self.stop()
            else:
                self._failures = 0
                self._check_sources(str(e))
        except (FormatError, FileNotFoundError, pa.ArrowException) as e:
            self._check_sources(str(e))
        except OSError as e:
            self._rest_until_ns = start + _REST_NS
            if e.errno not in NO_SPACE:
                self._state.problems["compaction"] = f"segments cannot be merged: {e.strerror or e}"
            self.stop()
        return finished

    def stop(self) -> None:
        """Gives up the merge in progress and removes its file."""
        merge, self._merge = self._merge, None
        self._state.merging_bytes = 0
        if merge is not None:
            with contextlib.suppress(OSError):
                merge.abort()

    def _has_merge(self) -> bool:
        merge = self._merge
        if merge is not None:
            # Retention and damage remove segments at any time, and other programs use up space, so both are checked at
            # each step.
            present = all(self._state.segment(s.path) is s for s in merge.sources)
            if present and self._space.room() >= _size(merge.sources) - merge.written:
                return True
            self.stop()
        state, now = self._state, self._context.clock.pair().real_ns
        limits, first_part = self._space.limits, state.first_part
        searched = (state.changes, limits, first_part, frozenset(self._unfit), now // _SEARCH_NS)
        if searched == self._nothing:
            return False
        sources = choose(state.segments, limits, now, first_part, self._unfit)
        self._nothing = None if sources else searched
        if not sources or self._space.room() < _size(sources):
            return False
        self._merge = _Merge(self._context, sources)
        return True

    def _step(self) -> int:
        merge = self._merge
        assert merge is not None
        merged = merge.step()
        self._state.merging_bytes = merge.written
        if merged is None:
            return 0
        # Without the sync, a removed log part could come back after a power cut, and its rows would look unsealed.
        self._context.files.fsync_dir(self._context.root / WAL_DIR)
        self._merge = None
        self._failures = 0
        self._state.merging_bytes = 0
        self._state.problems.pop("compaction", None)
        return int(self._editor.replace(merge.sources, merged))

    def _check_sources(self, reason: str) -> None:
        sources = self._merge.sources if self._merge else ()
        self.stop()
        # Damaged sources are set aside. The good sources then become neighbours and can be merged.
        bad = [s for s in sources if self._quarantine.check(s.path, reason)]
        known = {s.path for s in self._state.segments}
        if not bad and known.issuperset(s.path for s in sources):
            self._unfit.update(s.path for s in sources)
        self._unfit &= known


def _size(segments: Iterable[Segment]) -> int:
    return sum(s.size for s in segments)
