"""The clock by which rows age: rows do not become old at once when the wall clock jumps ahead."""

from __future__ import annotations

from collections.abc import Iterable

from probing.daemon.clock import ClockPair
from probing.daemon.store.manifest import Segment

__all__ = ("AgeClock", "steady_time")

# The wall clock may run ahead of the kernel's by this much. A longer jump is not believed for this time.
_JUMP_NS = 300 * 1_000_000_000
_DOUBT_NS = 24 * 3_600 * 1_000_000_000
# From one stored segment to the next; a segment spans some hours at most.
_GAP_NS = 24 * 3_600 * 1_000_000_000


class AgeClock:
    """Starts from the times of the ``stored`` segments. Not safe for two threads."""

    def __init__(self, stored: Iterable[Segment], pair: ClockPair) -> None:
        self._steady = min(steady_time(stored) or pair.real_ns, pair.real_ns)
        self._boot = pair.boot_ns
        self._doubted_since: int | None = None

    def now(self, pair: ClockPair) -> int:
        """Returns UTC ns. A jump ahead, also from the last stored row to now, counts after it has lasted for a day."""
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


def steady_time(segments: Iterable[Segment]) -> int:
    """Returns when the last of ``segments`` was written, UTC ns, without jumps ahead that did not last.

    0 when there are none.
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
