"""Rate limit with backoff: a process that comes often passes more and more rarely, but always again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ("Pace",)

FIRST_S, LAST_S = 0.2, 10.0
# A process that has not come for so long is forgotten.
QUIET_S = 30.0


@dataclass(slots=True)
class _Known:
    """Times on time.monotonic(): ``due`` is when it may pass again."""

    seen: float
    due: float
    span: float
    waits: bool


class Pace:
    """For one thread."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def passing(self, pids: Iterable[int]) -> list[int]:
        """Returns the ``pids`` that pass now, and earlier ones whose pause is over. To be called often."""
        now = time.monotonic()
        for pid in pids:
            known = self._known.get(pid)
            if known is None:
                self._known[pid] = _Known(now, now, FIRST_S, waits=True)
            else:
                known.seen, known.waits = now, True
        found = [pid for pid, known in self._known.items() if known.waits and known.due <= now]
        for pid in found:
            known = self._known[pid]
            known.waits, known.due, known.span = False, now + known.span, min(2 * known.span, LAST_S)
        quiet = [pid for pid, known in self._known.items() if now - known.seen > QUIET_S]
        for pid in quiet:
            del self._known[pid]
        return found
