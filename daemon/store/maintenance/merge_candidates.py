"""Chooses the neighbouring segments that are merged next. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone

from probing.daemon.store.limits import StoreLimits, TableLimits, merge_reserve
from probing.daemon.store.manifest import Segment

__all__ = ("choose",)

# A merged segment has at least this many times the bytes and rows of its largest source, so that the rewrites of a row
# are the logarithm of the segment's size. Rows count too, as the smallest files are mostly footer.
_GROWTH = 10
# About twenty seconds of work.
_MAX_ROWS = 1 << 25
# Sources of one merge; the next one takes more.
_MAX_SOURCES = 64
# The growth for a day that is over, whose last small segments are merged as well.
_COLD_GROWTH = 2
_COLD_S = 3_600
_DAY_S = 86_400
# The share of a table's limits that one segment may hold: retention drops whole segments.
_SHARE = 8


def choose(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, first_part: int | None, unfit: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Returns neighbours to merge, in order; empty when no merge is worth its cost.

    ``now_ns`` is UTC. ``first_part`` is the first sealed log part whose file still exists: segments of it or of later
    parts are not merged, so that a start knows which log parts a segment replaces. ``unfit``: paths to leave out.
    """
    folders: dict[str, list[Segment]] = {}
    for segment in segments:
        folders.setdefault(segment.path.rsplit("/", 1)[0], []).append(segment)
    # Folders with the most segments first.
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
    """Yields runs of neighbours between segments that stay as they are, mostly because they are full."""
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
    """Returns the longest run from the first segment on that is worth a merge; empty when there is none."""
    best = size = rows = largest = longest = 0
    since, until = stretch[0].ts_min, stretch[0].ts_max
    for count, segment in enumerate(stretch, 1):
        since, until = min(since, segment.ts_min), max(until, segment.ts_max)
        size, largest = size + segment.size, max(largest, segment.size)
        rows, longest = rows + segment.rows, max(longest, segment.rows)
        if size > most or rows > _MAX_ROWS or (count > 1 and until - since > span_ns):
            break
        # Segments of up to a quarter of a full one may be merged into a full one at once.
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
