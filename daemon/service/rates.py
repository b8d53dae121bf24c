"""Bounds the calls a second of each caller over TCP, by a token bucket for each."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from probing.api.errors import Overloaded
from probing.daemon.query.caller import Caller

__all__ = ("Rates",)

# A caller that paused may make the calls of so many seconds at once.
BURST_S = 2.0
MAX_CALLERS = 4096


class Rates:
    """``per_s``: calls that a caller may make in a second. Belongs to one event loop."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._now = now
        # Calls that are left, and the time of the last call; the least recent first.
        self._left: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def take(self, caller: Caller) -> None:
        """Counts a call. Raises Overloaded if the caller, an address with one token, makes too many."""
        if math.isinf(self._per_s):
            return
        key, now = (caller.who, caller.name), self._now()
        most = max(self._per_s * BURST_S, 1.0)
        left, since = self._left.pop(key, (most, now))
        left = min(left + (now - since) * self._per_s, most)
        self._left[key] = (left - 1.0 if left >= 1.0 else left, now)
        while len(self._left) > MAX_CALLERS:
            self._left.popitem(last=False)
        if left < 1.0:
            raise Overloaded(f"more than {self._per_s:g} calls a second by {caller}", hint="ask less often")
