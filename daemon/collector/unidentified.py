"""Records of processes that are not identified yet: they wait in their ring, and for a short time only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ("HOLD_S", "Expected", "Strangers")

# How long rows wait for the identity of their process, s: reading it takes some 50 ms. They would wait a second in the
# ring anyway, so nobody's rows come later for it; a query waits as long at most.
HOLD_S = 0.5
# An entry is some 200 bytes. The oldest goes first: a process that was waited for is not waited for again.
MAX_SEEN = 65536
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class Expected(Protocol):
    """``processes.discovery.Discovery``: neither of these blocks."""

    def expected(self, pid: int, start_ns: int) -> bool:
        """Whether the process is not identified, and may be soon."""

    def on_mapping(self, pid: int) -> None:
        """Have the process looked at next."""


class Strangers:
    """For the thread that drains. One for all rings: a process is waited for once."""

    def __init__(self, processes: Expected, now: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._now = now
        self._since: OrderedDict[tuple[int, int], float] = OrderedDict()

    def takes(self, records: npt.NDArray[Any]) -> int:
        """How many of the first records can become rows now: those before the first of an awaited process.

        ``records`` have ``tgid`` and ``start_ns``. All processes among them begin to be waited for at once.
        """
        mixed = records["start_ns"] * _MIX + records["tgid"]
        firsts = np.unique(mixed, return_index=True)[1].tolist()
        keys = [(int(records["tgid"][at]), int(records["start_ns"][at])) for at in firsts]
        return min((at for at, key in zip(firsts, keys, strict=True) if self._waits(key)), default=len(records))

    def _waits(self, key: tuple[int, int]) -> bool:
        if not self._processes.expected(*key):
            return False
        now = self._now()
        if key not in self._since:
            self._since[key] = now
            if len(self._since) > MAX_SEEN:
                self._since.popitem(last=False)
            self._processes.on_mapping(key[0])
        return now - self._since[key] < HOLD_S
