"""Keeps processes in quarantine. A process in quarantine is not read, because an earlier read did not end."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from probing.api.errors import TargetTimeout
from probing.daemon.backoff import doubled

__all__ = ("Quarantine", "Quarantines")

# The longest quarantine, s. Each consecutive quarantine of a process lasts twice as long as the one before.
MAX_QUARANTINE_S = 480.0
MAX_QUARANTINED = 4_096
_log = logging.getLogger(__name__)


class Quarantine(NamedTuple):
    """The quarantine of a process that did not answer the request ``op``. ``since`` and ``until`` are CLOCK_MONOTONIC
    seconds; ``times`` is the number of consecutive quarantines.
    """

    pid: int
    start_ns: int
    op: str
    since: float
    until: float
    times: int


class Quarantines:
    """The quarantined processes, at most 4,096: beyond this, the oldest entry is dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], Quarantine] = OrderedDict()

    def refuse(self, pid: int, start_ns: int) -> None:
        """Raises TargetTimeout while the process is in quarantine. ``pid`` 0 is never in quarantine."""
        with self._lock:
            held = self._held.get((pid, start_ns)) if pid else None
        if held is not None and held.until > time.monotonic():
            raise TargetTimeout(f"process {pid} is in quarantine because an earlier read did not end ({held.op})")

    def seconds_left(self, pid: int, start_ns: int) -> float:
        """Returns the seconds until the end of the process's quarantine; 0 if the process is not in quarantine."""
        with self._lock:
            held = self._held.get((pid, start_ns))
        return max(0.0, held.until - time.monotonic()) if held is not None else 0.0

    def add(self, pid: int, start_ns: int, op: str, first_s: float) -> None:
        """Starts a quarantine. The first quarantine of a process lasts ``first_s`` seconds, each consecutive quarantine
        twice as long as the one before, up to MAX_QUARANTINE_S.
        """
        now = time.monotonic()
        with self._lock:
            before = self._held.pop((pid, start_ns), None)
            times = before.times + 1 if before else 1
            span = doubled(first_s, times - 1, MAX_QUARANTINE_S)
            self._held[pid, start_ns] = Quarantine(pid, start_ns, op, now, now + span, times)
            while len(self._held) > MAX_QUARANTINED:
                self._held.popitem(last=False)
        _log.warning("a read of process %d did not end (%s): it is not read again for %g s", pid, op, span)

    def end(self, pid: int, start_ns: int) -> None:
        """Ends the quarantine of a process that answered or exited."""
        if self._held:
            with self._lock:
                self._held.pop((pid, start_ns), None)

    def current(self) -> list[Quarantine]:
        """Returns the quarantines that have not ended."""
        now = time.monotonic()
        with self._lock:
            return [q for q in self._held.values() if q.until > now]
