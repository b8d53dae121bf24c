"""Converts between kernel clocks and wall time.

Records carry the kernel's monotonic time; ``ts`` is UTC. A ``ClockPair`` relates the two. One is taken at each drain
and written into the log, so a step of the wall clock changes no duration.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ("Clock", "ClockPair", "FakeClock", "SystemClock")


@dataclass(frozen=True, slots=True)
class ClockPair:
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


class Clock(Protocol):
    @property
    def boot_id(self) -> str: ...

    def pair(self) -> ClockPair: ...


class SystemClock:
    """The machine's clocks. ``boot_id`` changes with every boot; kernel times of two boots are not comparable."""

    def __init__(self) -> None:
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    @property
    def boot_id(self) -> str:
        return self._boot_id

    def pair(self) -> ClockPair:
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        real = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return ClockPair((before + after) // 2, boot, real)


class FakeClock:
    """A clock that tests set: offsets, steps and reboots."""

    def __init__(self, mono_ns: int = 0, real_ns: int = 0, boot_id: str = "00000000-test") -> None:
        self.mono_ns = mono_ns
        self.real_ns = real_ns
        self.boot_id = boot_id

    def pair(self) -> ClockPair:
        return ClockPair(self.mono_ns, self.mono_ns, self.real_ns)

    def advance(self, ns: int, *, wall_step_ns: int = 0) -> None:
        self.mono_ns += ns
        self.real_ns += ns + wall_step_ns
