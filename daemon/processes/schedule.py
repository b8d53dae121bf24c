"""Schedules the reads of processes for their identification."""

from __future__ import annotations

import heapq
import time

from probing.daemon.backoff import doubled

__all__ = ("AGAIN_S", "Agenda", "next_look_s", "retry_s")

# The pauses between the first reads of a Python, which may still become a trainer, s.
AGAIN_S = (0.2, 0.3, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 15.0)
RARELY_S, MAX_RARELY_S = 30.0, 120.0
# The longest pause between reads of a process that is watched or has a framework, s. The first number is for the first
# reads of the process, the second for later reads.
NEAR_S, NEAR_LATER_S = 5.0, 15.0
# The pause after a failed read of a process, s, at first and at most.
RETRY_S, MAX_RETRY_S = 2.5, 300.0


class Agenda:
    """The pids to read, by time; each pid occurs once, with its earliest time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._at: dict[int, float] = {}

    def add(self, pid: int, delay: float) -> None:
        """Adds ``pid``, due ``delay`` seconds from now."""
        at = time.monotonic() + delay
        if self._at.get(pid, float("inf")) > at:
            self._at[pid] = at
            heapq.heappush(self._heap, (at, pid))

    def due(self) -> list[int]:
        """Removes and returns the pids that are due now."""
        now = time.monotonic()
        pids = []
        while self._heap and self._heap[0][0] <= now:
            at, pid = heapq.heappop(self._heap)
            if self._at.get(pid) == at:
                del self._at[pid]
                pids.append(pid)
        return pids

    def next_at(self, otherwise: float) -> float:
        """Returns the time when the next pid is due, on time.monotonic(), or ``otherwise`` if that is earlier."""
        return min(otherwise, self._heap[0][0]) if self._heap else otherwise


def next_look_s(looks: int, *, near: bool) -> float:
    """Returns the seconds until the next read of a process that was read ``looks`` times. ``near``: the process is
    watched or has a framework.
    """
    rarely = looks - len(AGAIN_S) - 1
    delay = AGAIN_S[looks - 1] if rarely < 0 else doubled(RARELY_S, rarely, MAX_RARELY_S)
    return min(delay, NEAR_S if looks <= 2 * len(AGAIN_S) else NEAR_LATER_S) if near else delay


def retry_s(failures: int) -> float:
    """Returns the seconds until the next read of a process whose last read failed. ``failures``: the number of
    consecutive failures before the last read.
    """
    return doubled(RETRY_S, failures, MAX_RETRY_S)
