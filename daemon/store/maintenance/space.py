"""Keeps the store within its limits of space and age, and decides whether there is space to append and to merge.

The age of rows is measured by a special clock: rows do not become old at once when the wall clock jumps ahead.
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
# A longer time than this from one stored segment to the next is a jump; a segment spans some hours at most.
_GAP_NS = 24 * 3_600 * 1_000_000_000


class _AgeClock:
    """The clock for the age of rows. It starts from the times of the ``stored`` segments. Not safe for two threads."""

    def __init__(self, stored: Iterable[Segment], pair: ClockPair) -> None:
        self._steady = min(_steady_time(stored) or pair.real_ns, pair.real_ns)
        self._boot = pair.boot_ns
        self._doubted_since: int | None = None

    def now(self, pair: ClockPair) -> int:
        """Returns the time by which rows expire, UTC ns. If the clock jumps ahead, also while no daemon runs, the new
        time is used only after it has lasted for a day.
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
    """Returns the time when the last of ``segments`` was written, UTC ns. Ignores jumps ahead that lasted under a day.

    0 if there are no segments.
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


# A time ahead of the clock by up to this much counts as right, ns.
_AHEAD_NS = 60 * 1_000_000_000


def to_drop(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, other_bytes: int, free_bytes: int, need: int = 0
) -> list[Segment]:
    """Returns the segments to drop, oldest first.

    ``now_ns`` is UTC. A segment with later times, which are wrong, counts as old as the log parts before it.
    ``other_bytes``: bytes that the store uses for other files than segments; ``free_bytes``: free space of the file
    system, including dropped files that snapshots still hold; ``need``: bytes that must fit in addition.
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
    """Yields each segment with the time when it was written, UTC ns: its last ``ts``, unless that is in the future."""
    in_order = sorted(segments, key=lambda s: s.parts)
    right = [s.ts_max <= now_ns + _AHEAD_NS for s in in_order]
    # Segments before the first segment with right times were written before it.
    newest = next((s.ts_max for s, is_right in zip(in_order, right, strict=True) if is_right), now_ns)
    for segment, is_right in zip(in_order, right, strict=True):
        if is_right:
            newest = max(newest, segment.ts_max)
        yield segment.ts_max if is_right else newest, segment


# The share of max_bytes that corrupt/ may use: 1/20.
_ASIDE_SHARE = 20
# While nothing changes, old segments are searched this often, ns: the search takes 5 ms for 3,000 segments.
_SEARCH_NS = 10 * 1_000_000_000


class Space:
    """Keeps the store within its limits. Safe for any thread. Sets ``state.full`` while nothing may be appended."""

    def __init__(self, context: StoreContext, limits: StoreLimits, editor: ManifestEditor, aside: SetAside) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._aside = aside
        self._age = _AgeClock(context.state.segments, context.clock.pair())
        self._grace = Grace(context.files, context.root, context.clock.pair().boot_ns)
        self._aside_bytes = -1
        # What the last search that found no segment to drop depended on, apart from space.
        self._nothing: object = None
        self.set_limits(limits)

    @property
    def limits(self) -> StoreLimits:
        """The limits that apply now on this file system: new, stricter limits apply after their grace."""
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
                # Files that only snapshots hold count as free: otherwise each turn would drop as many bytes again.
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
        """Returns the bytes that a merge may use without coming near a limit; may be negative. Raises OSError."""
        limits = self._limits
        room = limits.max_bytes - self._used() - self._state.held_bytes
        return min(room, self._free()[0] - limits.keep_free_bytes - limits.part_bytes)

    def drop_oldest(self, need: int) -> bool:
        """Drops the oldest segments, ``need`` bytes of them. Returns False if there is no segment to drop.

        For use after a write failed for lack of space: the free space does not show a quota or reserved blocks. Files
        that only snapshots hold are part of ``need``: otherwise each failure would drop as many bytes again.
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
        # The drain logs a full store: its writes also fail on a disk that has free space only for root.
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
