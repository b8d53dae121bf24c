"""Chooses the processes whose mappings are polled, where the kernel does not report new mappings."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

__all__ = ("YoungProcesses",)

# A program maps its libraries in its first seconds: loading torch from a cold disk takes up to a minute.
AGE_S = 60.0
INTERVAL_S = 1.0
# Where more programs start, the oldest are left to the scan of all processes.
MAX_YOUNG = 256


class YoungProcesses:
    """Processes that have run their program for less than ``AGE_S``; safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: OrderedDict[int, float] = OrderedDict()
        self._due = 0.0

    def add(self, pid: int) -> None:
        """Start polling a process: it runs a new program."""
        with self._lock:
            self._until.pop(pid, None)
            self._until[pid] = time.monotonic() + AGE_S
            if len(self._until) > MAX_YOUNG:
                self._until.popitem(last=False)

    def remove(self, pid: int) -> None:
        with self._lock:
            self._until.pop(pid, None)

    def due(self) -> list[int]:
        """Returns the processes to look at now: all of them once per ``INTERVAL_S``, otherwise none."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + INTERVAL_S
        with self._lock:
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            return list(self._until)
