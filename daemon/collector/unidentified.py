"""Holds back records of processes that are not identified yet: they wait in their ring for a short time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ("HOLD_S", "Expected", "IdentityWait")

# How long rows wait for the identity of their process, s: reading it takes some 50 ms. They would wait a second in the
# ring anyway, so no rows come later for it; a query waits so long at most.
HOLD_S = 0.5
# An entry takes some 200 bytes. The oldest is evicted first; a process is waited for once.
MAX_SEEN = 65536
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class Expected(Protocol):
    """``processes.discovery.Discovery``: neither of these blocks."""

    def expected(self, pid: int, start_ns: int) -> bool:
        """Returns whether the process is not identified yet, and may be soon."""

    def on_mapping(self, pid: int) -> None:
        """Schedule the process as the next one to read."""


class IdentityWait:
    """For the thread that drains. One for all rings: a process is waited for once."""

    def __init__(self, processes: Expected, now: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._now = now
        self._since: OrderedDict[tuple[int, int], float] = OrderedDict()

    def takes(self, records: npt.NDArray[Any]) -> int:
        """Returns how many of the first records can become rows now: those before the first of an awaited process.

        ``records`` have ``tgid`` and ``start_ns``. The wait for all processes among them begins at once.
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
