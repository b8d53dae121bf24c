"""Keeps the store within its limits of space and age, and decides whether there is space to append and to merge.

``_AgeClock`` measures the age of rows: rows do not become old at once when the wall clock jumps ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from probing.daemon.clock import ClockPair
from probing.daemon.store.context import StoreContext
from probing.daemon.store.files import store_error
from probing.daemon.store.limits import DEFAULT_FREE_BYTES, StoreLimits, TableLimits, merge_reserve, on_file_system
from probing.daemon.store.maintenance.grace import Deletion, Grace
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.manifest import Edit, Segment
from probing.daemon.store.recovery.set_aside import SetAside

__all__ = (
    "Space",
    "to_drop",
)

# The wall clock may run ahead of the kernel's clock by _JUMP_NS. A longer jump is ignored for _DOUBT_NS.
_JUMP_NS = 300 * 1_000_000_000
_DOUBT_NS = 24 * 3_600 * 1_000_000_000
# A longer time than this between the last rows of consecutive segments is a jump of the clock, because a segment spans
# at most some hours.
_GAP_NS = 24 * 3_600 * 1_000_000_000


class _AgeClock:
    """The clock for the age of rows. It starts from the times of the ``stored`` segments. Not thread-safe."""

    def __init__(self, stored: Iterable[Segment], pair: ClockPair) -> None:
        self._steady = min(_steady_time(stored) or pair.real_ns, pair.real_ns)
        self._boot = pair.boot_ns
        self._doubted_since: int | None = None

    def now(self, pair: ClockPair) -> int:
        """Returns the present time for the age of rows, UTC ns. If the wall clock jumps ahead, even while no daemon
        runs, the new time is used only after the jump has lasted for a day.
        """
        self._steady += pair.boot_ns - self._boot
        self._boot = pair.boot_ns
        if pair.real_ns <= self._steady + _JUMP_NS:
            self._doubted_since = None
        elif self._doubted_since is None:
            self._doubted_since = pair.boot_ns
            return self._steady
        elif pair.boot_ns - self._doubted_since < _DOUBT_NS:
            return self._steady
        else:
            self._doubted_since = None
        self._steady = pair.real_ns
        return self._steady


def _steady_time(segments: Iterable[Segment]) -> int:
    """Returns the time when the last of ``segments`` was written, UTC ns. Ignores jumps ahead that lasted less than a
    day.

    Returns 0 if there are no segments.
    """
    steady = before = 0
    lasted: int | None = None
    for segment in sorted(segments, key=lambda s: s.parts):
        passed, before = segment.ts_max - before, segment.ts_max
        if not steady:
            steady = segment.ts_max
        elif passed > _GAP_NS:
            lasted = 0
        else:
            steady += passed
            lasted = None if lasted is None or passed < -_GAP_NS else lasted + passed
        if lasted is not None and lasted >= _DOUBT_NS:
            steady, lasted = segment.ts_max, None
    return steady


# The maximum time by which a valid ``ts`` is ahead of the clock, ns.
_AHEAD_NS = 60 * 1_000_000_000


def to_drop(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, other_bytes: int, free_bytes: int, need: int = 0
) -> list[Segment]:
    """Returns the segments to drop, oldest first.

    ``now_ns`` is UTC. A last ``ts`` of more than _AHEAD_NS after ``now_ns`` is not trusted: instead, such a segment
    gets the newest valid ``ts`` of the segments written before it. ``other_bytes``: bytes that the store uses for files
    other than segments; ``free_bytes``: free space of the file system, including dropped files that snapshots still
    hold; ``need``: bytes of space that the next write needs.
    """
    left = sorted(_by_part(segments, now_ns), key=lambda pair: (pair[0], pair[1].parts, pair[1].path))
    dropped: list[Segment] = []
    used: dict[str, int] = {}
    for _, segment in left:
        used[segment.table] = used.get(segment.table, 0) + segment.size
    total = sum(used.values())
    most = limits.max_bytes - merge_reserve(limits)
    gone = 0
    for written_ns, segment in left:
        own = limits.tables.get(segment.table, TableLimits())
        age_s = min(limits.max_age_s, own.max_age_s if own.max_age_s is not None else limits.max_age_s)
        if (
            written_ns < now_ns - int(age_s * 1e9)
            or (own.max_bytes is not None and used[segment.table] > own.max_bytes)
            or total - gone + other_bytes + need > most
            or free_bytes + gone < limits.keep_free_bytes + need
        ):
            dropped.append(segment)
            used[segment.table] -= segment.size
            gone += segment.size
    return dropped


def _by_part(segments: Iterable[Segment], now_ns: int) -> Iterator[tuple[int, Segment]]:
    """Yields each segment with the time when it was written, UTC ns: its last ``ts``. If this ``ts`` is in the future,
    the newest valid ``ts`` of the segments before it is used instead.
    """
    in_order = sorted(segments, key=lambda s: s.parts)
    right = [s.ts_max <= now_ns + _AHEAD_NS for s in in_order]
    # Segments before the first segment with a valid ``ts`` get the age of that segment, because they were written
    # before it.
    newest = next((s.ts_max for s, is_right in zip(in_order, right, strict=True) if is_right), now_ns)
    for segment, is_right in zip(in_order, right, strict=True):
        if is_right:
            newest = max(newest, segment.ts_max)
        yield segment.ts_max if is_right else newest, segment


# The folder corrupt/ may use 1/20 of max_bytes.
_ASIDE_SHARE = 20
# The interval of searches for old segments while nothing changes, ns. A search takes 5 ms for 3,000 segments.
_SEARCH_NS = 10 * 1_000_000_000


class Space:
    """Keeps the store within its limits. Thread-safe. Sets ``state.full`` while a limit forbids appending."""

    def __init__(self, context: StoreContext, limits: StoreLimits, editor: ManifestEditor, aside: SetAside) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._aside = aside
        self._age = _AgeClock(context.state.segments, context.clock.pair())
        self._grace = Grace(context.files, context.root, context.clock.pair().boot_ns)
        self._aside_bytes = -1
        # The inputs, apart from space, of the last search, if that search found no segment to drop.
        self._nothing: object = None
        self.set_limits(limits)

    @property
    def limits(self) -> StoreLimits:
        """The limits that apply now on this file system: a new, stricter limit applies only after its delay
        (``grace_s``).
        """
        return self._limits

    def set_limits(self, limits: StoreLimits) -> None:
        """Sets the limits for the next ``retain`` and later; stricter limits delete nothing for ``limits.grace_s``."""
        with self._editor.lock:
            self._configured = limits
            self._follow()

    def deletion(self, limits: StoreLimits) -> Deletion:
        """Returns the rows that ``limits`` would delete now, but the configured limits would not. Raises OSError."""
        with self._editor.lock:
            set_now = self._doomed(self._on_disk(self._configured))
            return _deletion(self._doomed(self._on_disk(limits)), set_now, limits.grace_s)

    def waiting(self) -> dict[str, Deletion]:
        """Returns the rows that stricter limits will delete, by setting, as of now. Raises OSError."""
        with self._editor.lock:
            wanted = self._on_disk(self._configured)
            kept = self._doomed(self._limits)
            return {
                key: _deletion(self._doomed(self._grace.without((key,), wanted)), kept, left_s)
                for key, left_s in self._grace.waiting().items()
            }

    def retain(self) -> None:
        """Drops segments beyond the limits of age and space, and checks whether there is space to append. Raises
        StoreError.
        """
        state = self._state
        with self._editor.lock:
            try:
                # Files that only snapshots hold count as free: otherwise each round would drop more segments for the
                # same bytes.
                free = self._free()[0] + state.held_bytes
                self._follow()
                now = self._age.now(self._context.clock.pair())
                self._editor.drop(self._to_drop(now, free))
                if "manifest" in state.problems:
                    self._editor.commit(Edit())
                excess = self.excess()
            except OSError as e:
                state.problems["retention"] = f"old segments cannot be dropped: {e.strerror or e}"
                raise store_error(e, self._context.root) from e
            state.problems.pop("retention", None)
            self._set_full(excess)

    def _to_drop(self, now: int, free: int) -> list[Segment]:
        """Returns the segments to drop now. ``free``: free bytes, including files that only snapshots hold."""
        state, limits = self._state, self._limits
        searched = (state.changes, limits, now // _SEARCH_NS)
        segments, other = state.segments, state.other_bytes
        used = sum(segment.size for segment in segments) + other
        is_short = used > limits.max_bytes - merge_reserve(limits) or free < limits.keep_free_bytes
        if searched == self._nothing and not is_short:
            return []
        doomed = to_drop(segments, limits, now, other, free)
        self._nothing = None if doomed else searched
        return doomed

    def check(self) -> None:
        """Checks whether there is space to append, and drops nothing. Raises StoreError."""
        try:
            self._set_full(self.excess())
        except OSError as e:
            raise store_error(e, self._context.root) from e

    def excess(self) -> str:
        """Returns, in words, the limit that forbids appending; empty if no limit does. Raises OSError."""
        used, (free, _) = self._used(), self._free()
        if used > self._limits.max_bytes:
            return f"{used} bytes are used, max_bytes is {self._limits.max_bytes}"
        if free < self._limits.keep_free_bytes:
            return f"{free} bytes are free, keep_free_bytes is {self._limits.keep_free_bytes}"
        return ""

    def room(self) -> int:
        """Returns the bytes that a merge may use without coming near a limit; the number may be negative. Raises
        OSError.
        """
        limits = self._limits
        room = limits.max_bytes - self._used() - self._state.held_bytes
        return min(room, self._free()[0] - limits.keep_free_bytes - limits.part_bytes)

    def drop_oldest(self, need: int) -> bool:
        """Drops the oldest segments until they add up to ``need`` bytes. Returns False if there is no segment to drop.

        For use after a write failed for lack of space: the free space does not show a quota or reserved blocks. Files
        that only snapshots hold are subtracted from ``need``: otherwise each failure would drop more segments for the
        same bytes.
        """
        with self._editor.lock:
            need -= self._state.held_bytes
            if need <= 0:
                return False
            limits = replace(self._limits, keep_free_bytes=0)
            now = self._age.now(self._context.clock.pair())
            doomed = to_drop(self._state.segments, limits, now, 0, 0, need)
            self._editor.drop_files_first(doomed)
            return bool(doomed)

    def _free(self) -> tuple[int, int]:
        return self._context.files.space(self._context.root)

    def _follow(self) -> None:
        """Updates the limits that apply now."""
        self._limits = self._grace.in_force(self._on_disk(self._configured), self._context.clock.pair().boot_ns)
        self._state.problems.pop("limits", None)
        if self._grace.problem:
            self._state.problems["limits"] = self._grace.problem
        if self._aside_bytes != (most := self._limits.max_bytes // _ASIDE_SHARE):
            self._aside_bytes = most
            with contextlib.suppress(OSError):
                self._aside.limit(most)
                self._state.set_aside_bytes = self._aside.bytes

    def _doomed(self, limits: StoreLimits) -> dict[str, Segment]:
        """Returns the segments beyond ``limits``, by path."""
        state = self._state
        free = self._free()[0] + state.held_bytes
        now = self._age.now(self._context.clock.pair())
        return {s.path: s for s in to_drop(state.segments, limits, now, state.other_bytes, free)}

    def _on_disk(self, limits: StoreLimits) -> StoreLimits:
        size = DEFAULT_FREE_BYTES * 10
        with contextlib.suppress(OSError):
            size = self._free()[1]
        return on_file_system(limits, size)

    def _set_full(self, excess: str) -> None:
        # A full store is not logged here. The drain logs it, because only a failed write shows that the remaining free
        # space is reserved for root.
        state = self._state
        state.problems.pop("full", None)
        state.full = bool(excess)
        if excess:
            state.problems["full"] = f"nothing is stored: {excess}"

    def _used(self) -> int:
        state = self._state
        return sum(s.size for s in state.segments) + state.other_bytes + state.merging_bytes


def _deletion(doomed: Mapping[str, Segment], without: Collection[str], left_s: float) -> Deletion:
    more = [segment for path, segment in doomed.items() if path not in without]
    return Deletion(len(more), sum(s.rows for s in more), sum(s.size for s in more), left_s)
