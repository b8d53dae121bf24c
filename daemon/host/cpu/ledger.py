"""Keeps the last reading of each process and thread, and forms differences to it.

A key holds the start time, so two lives of a number never meet; a counter that goes back gives no difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.host.cpu.reading import FIELDS, THREAD
from probing.daemon.host.cpu.task_stat import ABSENT

__all__ = ("ROW", "Ledger", "Rows", "differences", "rows_of")

ROW = np.dtype([(name, "<i8") for name in FIELDS])
Rows = npt.NDArray[Any]
MOST = 32_768
FORGET_NS = 900_000_000_000
_FIRST = 256


class Ledger:
    """``most``: how many processes and threads are remembered; the rest gets no differences."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._slots: dict[tuple[int, ...], int] = {}
        self._rows = np.zeros(_FIRST, ROW)
        self._free: list[int] = list(range(_FIRST))[::-1]
        self._forgot_ns = 0

    def __len__(self) -> int:
        return len(self._slots)

    def exchange(self, rows: Rows) -> Rows:
        """Remembers ``rows`` and returns what was remembered in their places; ``mono_ns`` 0: nothing."""
        before = np.zeros(len(rows), ROW)
        if not len(rows):
            return before
        self._forget(int(rows["mono_ns"].max()))
        # A glance at a process and a reading of it are the same thing; the main thread is another one.
        names = (rows["scope"] == THREAD, *(rows[name] for name in ("pid", "start_ns", "tid", "task_start_ns")))
        keys = list(zip(*(column.tolist() for column in names), strict=True))
        slots = np.array([self._slots.get(key, -1) for key in keys], np.intp)
        known = slots >= 0
        before[known] = self._rows[slots[known]]
        for place in np.flatnonzero(~known).tolist():
            slots[place] = self._new(keys[place])
        kept = slots >= 0
        self._rows[slots[kept]] = rows[kept]
        return before

    def _new(self, key: tuple[int, ...]) -> int:
        if key in self._slots or len(self._slots) >= self._most:
            return -1  # a reader that names one task twice gets one place
        if not self._free:
            size = len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros(size, ROW)])
            self._free = list(range(size, 2 * size))[::-1]
        self._slots[key] = slot = self._free.pop()
        return slot

    def _forget(self, now_ns: int) -> None:
        if now_ns - self._forgot_ns < FORGET_NS // 15:
            return
        self._forgot_ns = now_ns
        old = now_ns - FORGET_NS
        for key in [key for key, slot in self._slots.items() if self._rows["mono_ns"][slot] < old]:
            self._free.append(self._slots.pop(key))


def rows_of(payload: bytes) -> Rows:
    """Returns the rows of a reader's answer; bytes behind the last whole row are left out."""
    return np.frombuffer(payload, ROW, len(payload) // ROW.itemsize)


def differences(now: Rows, before: Rows) -> Rows:
    """Returns how much each counter grew, ABSENT where one of the two is not known or it went back."""
    ours, old = (np.ascontiguousarray(rows).view(np.int64).reshape(len(rows), len(FIELDS)) for rows in (now, before))
    grown = ours - old
    unknown = (ours == ABSENT) | (old == ABSENT) | (grown < 0) | (before["mono_ns"] == 0)[:, None]
    grown[unknown] = ABSENT
    return grown.view(ROW).reshape(len(now))
