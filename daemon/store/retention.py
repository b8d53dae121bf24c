"""What goes when space or age say so: a pure function over what there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from probing.daemon.store.manifest import Segment

__all__ = ("DEFAULT_FREE_BYTES", "StoreLimits", "TableLimits", "merge_reserve", "on_file_system", "to_drop")

_DAY_S = 86_400
DEFAULT_FREE_BYTES = 1 << 30
_FREE_SHARE = 10
# Clocks differ by so much without being wrong.
_AHEAD_NS = 60 * 1_000_000_000
# Of max_bytes, what merging segments may take for a while.
_MERGE_SHARE = 16


@dataclass(frozen=True, slots=True)
class TableLimits:
    """None: only the limits of the whole store hold."""

    max_bytes: int | None = None
    max_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Of ``max_bytes`` (all files of the state directory) and ``keep_free_bytes`` the stricter holds; the latter is, if
    below 0, ``DEFAULT_FREE_BYTES`` or a tenth of the file system, whichever is less.

    ``part_bytes`` is the size at which a log part is sealed, ``segment_bytes`` that up to which segments are merged.
    ``sync_interval_s`` is what a power cut may cost; ``lease_s`` how long a snapshot that nobody releases holds files.
    """

    max_bytes: int = 4 << 30
    keep_free_bytes: int = 256 << 20
    max_age_s: float = 7 * _DAY_S
    part_bytes: int = 8 << 20
    segment_bytes: int = 64 << 20
    sync_interval_s: float = 1.0
    lease_s: float = 600.0
    tables: Mapping[str, TableLimits] = field(default_factory=dict)


def on_file_system(limits: StoreLimits, size: int) -> StoreLimits:
    """``limits`` on a file system of ``size`` bytes: with a number of bytes to keep free."""
    if limits.keep_free_bytes >= 0:
        return limits
    return replace(limits, keep_free_bytes=min(DEFAULT_FREE_BYTES, size // _FREE_SHARE))


def merge_reserve(limits: StoreLimits) -> int:
    """Bytes of ``max_bytes`` that retention leaves to merging; no merged segment is larger."""
    return min(limits.segment_bytes, limits.max_bytes // _MERGE_SHARE)


def to_drop(
    segments: Iterable[Segment], limits: StoreLimits, now_ns: int, other_bytes: int, free_bytes: int, need: int = 0
) -> list[Segment]:
    """Segments to drop, oldest first. ``now_ns`` is UTC, and what is later has a wrong time: it counts as written when
    the parts before it were.

    ``other_bytes`` is what the store uses besides segments, ``free_bytes`` what the file system has left, with what is
    dropped already and still held by a snapshot; ``need`` is what must fit in addition.
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
    """Each segment with when it was written, UTC ns: its last time, if that is not to come yet."""
    in_order = sorted(segments, key=lambda s: s.parts)
    right = [s.ts_max <= now_ns + _AHEAD_NS for s in in_order]
    # Those before the first right one were written before it, too.
    newest = next((s.ts_max for s, known in zip(in_order, right, strict=True) if known), now_ns)
    for segment, known in zip(in_order, right, strict=True):
        if known:
            newest = max(newest, segment.ts_max)
        yield segment.ts_max if known else newest, segment
