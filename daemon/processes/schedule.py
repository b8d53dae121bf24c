"""When to look at which process."""

from __future__ import annotations

import heapq
import time

__all__ = ("Agenda",)


class Agenda:
    """Process numbers by the time they are due; a number is on it once, at its earliest time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._at: dict[int, float] = {}

    def add(self, pid: int, delay: float) -> None:
        """``delay`` in seconds from now."""
        at = time.monotonic() + delay
        if self._at.get(pid, float("inf")) > at:
            self._at[pid] = at
            heapq.heappush(self._heap, (at, pid))

    def due(self) -> list[int]:
        """Take off what is due now."""
        now = time.monotonic()
        pids = []
        while self._heap and self._heap[0][0] <= now:
            at, pid = heapq.heappop(self._heap)
            if self._at.get(pid) == at:
                del self._at[pid]
                pids.append(pid)
        return pids

    def next_at(self, otherwise: float) -> float:
        """When the next is due, on time.monotonic(); not later than ``otherwise``."""
        return min(otherwise, self._heap[0][0]) if self._heap else otherwise
