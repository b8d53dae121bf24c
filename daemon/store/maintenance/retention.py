"""Retention: chooses the segments to drop for space or age. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from probing.daemon.store.limits import StoreLimits, TableLimits, merge_reserve
from probing.daemon.store.manifest import Segment

__all__ = ("to_drop",)

# A time ahead of the clock by up to this much is not wrong.
_AHEAD_NS = 60 * 1_000_000_000


def to_drop(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, other_bytes: int, free_bytes: int, need: int = 0
) -> list[Segment]:
    """Returns the segments to drop, oldest first.

    ``now_ns`` is UTC; a segment with later times has wrong ones, and is as old as the log parts before it.
    ``other_bytes`` is what the store uses besides segments, ``free_bytes`` the free space of the file system with the
    dropped files that snapshots still hold, ``need`` what must fit in addition.
    """
    left = sorted(_by_part(segments, now_ns), key=lambda found: (found[0], found[1].parts, found[1].path))
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
    """Yields when each segment was written, UTC ns: its last ``ts``, unless that is in the future."""
    in_order = sorted(segments, key=lambda s: s.parts)
    right = [s.ts_max <= now_ns + _AHEAD_NS for s in in_order]
    # Segments before the first one with right times were written before it.
    newest = next((s.ts_max for s, known in zip(in_order, right, strict=True) if known), now_ns)
    for segment, known in zip(in_order, right, strict=True):
        if known:
            newest = max(newest, segment.ts_max)
        yield segment.ts_max if known else newest, segment
