"""Chooses the processes whose mappings are polled, where the kernel does not report new mappings."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

__all__ = ("YoungProcesses",)

# A program maps its libraries in its first seconds: loading torch from a cold disk takes up to a minute.
AGE_S = 60.0
# Between two polls of a process, s, and the share of its age that it is at least: most programs map all at once, and
# each poll takes a reader.
INTERVAL_S, SHARE = 1.0, 0.25
# Where more programs start, the oldest are left to the scan of all processes.
MAX_YOUNG = 256


@dataclass(slots=True)
class _Young:
    """Times on time.monotonic()."""

    since: float
    due: float


class YoungProcesses:
    """Processes that have run their program for less than ``AGE_S``; safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The oldest first.
        self._young: OrderedDict[int, _Young] = OrderedDict()

    def add(self, pid: int) -> None:
        """Start polling a process: it runs a new program."""
        now = time.monotonic()
        with self._lock:
            self._young.pop(pid, None)
            self._young[pid] = _Young(now, now)
            if len(self._young) > MAX_YOUNG:
                self._young.popitem(last=False)

    def remove(self, pid: int) -> None:
        with self._lock:
            self._young.pop(pid, None)

    def due(self) -> list[int]:
        """Returns the processes to look at now, and schedules the next look at each."""
        now = time.monotonic()
        with self._lock:
            while self._young and next(iter(self._young.values())).since + AGE_S <= now:
                self._young.popitem(last=False)
            found = [pid for pid, young in self._young.items() if young.due <= now]
            for young in (self._young[pid] for pid in found):
                young.due = now + max(INTERVAL_S, SHARE * (now - young.since))
        return found
