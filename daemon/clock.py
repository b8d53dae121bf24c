"""Converts between kernel clocks and wall time.

Records carry the kernel's monotonic time; ``ts`` is UTC. A ``ClockPair`` relates the two. Each drain reads a pair and
writes it into the log, so a step of the wall clock changes no duration.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ("Clock", "ClockPair", "FakeClock", "SystemClock", "until_next")
# The number of readings of the clocks for one pair; the fastest reading is used.
_READS = 4


class ClockPair(NamedTuple):
    """One instant on CLOCK_MONOTONIC, CLOCK_BOOTTIME and CLOCK_REALTIME, each in ns."""

    mono_ns: int
    boot_ns: int
    real_ns: int

    @property
    def mono_to_utc_ns(self) -> int:
        """The offset from monotonic time to UTC, ns."""
        return self.real_ns - self.mono_ns

    @property
    def boot_to_utc_ns(self) -> int:
        """The offset from time since boot to UTC, ns."""
        return self.real_ns - self.boot_ns


def until_next(interval_s: float) -> float:
    """Returns the seconds until the next multiple of ``interval_s`` on CLOCK_MONOTONIC that is more than an eighth of
    ``interval_s`` away.

    Threads of all processes that wait this way wake up together. That costs half as much as separate wakeups: the CPU
    leaves its idle state once, and its caches are warm.
    """
    if interval_s <= 0.0:
        return 0.0
    left = interval_s - time.monotonic() % interval_s
    return left if left > interval_s / 8 else left + interval_s


class Clock(Protocol):
    @property
    def boot_id(self) -> str: ...

    def pair(self) -> ClockPair: ...


class SystemClock:
    """The machine's clocks. ``boot_id`` changes with every boot; kernel times of two boots are not comparable.

    A newly measured offset between two clocks replaces the known offset only if they differ by more than the error of
    the measurement. Otherwise a drain that loses the CPU between two reads would shift its records against the records
    of the previous drain.
    """

    def __init__(self) -> None:
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._to_boot_ns, self._to_real_ns = 0, 0

    @property
    def boot_id(self) -> str:
        return self._boot_id

    def pair(self) -> ClockPair:
        before, boot, real, after = min((_read() for _ in range(_READS)), key=lambda read: read[-1] - read[0])
        mono, error = (before + after) // 2, after - before
        self._to_boot_ns = _steady(self._to_boot_ns, boot - mono, error)
        self._to_real_ns = _steady(self._to_real_ns, real - mono, error)
        return ClockPair(mono, mono + self._to_boot_ns, mono + self._to_real_ns)


def _read() -> tuple[int, int, int, int]:
    """Returns (monotonic, boot, real, monotonic again) time, ns."""
    clocks = time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME, time.CLOCK_REALTIME, time.CLOCK_MONOTONIC
    before, boot, real, after = map(time.clock_gettime_ns, clocks)
    return before, boot, real, after


def _steady(known: int, measured: int, error: int) -> int:
    return known if abs(measured - known) <= error else measured


class FakeClock:
    """A clock for tests, which set its times and its boot id."""

    def __init__(self, mono_ns: int = 0, real_ns: int = 0, boot_id: str = "00000000-test") -> None:
        self.mono_ns = mono_ns
        self.real_ns = real_ns
        self.boot_id = boot_id

    def pair(self) -> ClockPair:
        return ClockPair(self.mono_ns, self.mono_ns, self.real_ns)

    def advance(self, ns: int, *, wall_step_ns: int = 0) -> None:
        self.mono_ns += ns
        self.real_ns += ns + wall_step_ns
