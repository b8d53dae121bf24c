"""Runs the sampler's program on each CPU at a fixed rate, by a perf timer (PERF_COUNT_SW_CPU_CLOCK).

The timer has a fixed period. A timer with a frequency would be adjusted by the kernel all the time, and limited by
kernel.perf_event_max_sample_rate.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

from probing.api.errors import UsageError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.attach import refused
from probing.daemon.bpf.perf_events import ATTR_SIZE, enable, online_cpus, perf_event_open, set_program

__all__ = ("MAX_HZ", "CpuClock", "known_to_freeze", "open_cpu_clock", "running_release")

MAX_HZ = 999
_TYPE_SOFTWARE, _COUNT_CPU_CLOCK = 1, 0
# Bits of the flags in perf_event_attr, the field after read_format.
_DISABLED, _EXCLUDE_IDLE = 1 << 0, 1 << 7
_SECOND_NS = 1_000_000_000
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_SIGNATURE = Path("/proc/version_signature")
# First and last release without the fix, for each series of releases.
_FREEZING = (
    ((5, 19, 0), (6, 0, 1 << 16)),
    ((6, 1, 0), (6, 1, 35)),
    ((6, 2, 0), (6, 2, 1 << 16)),
    ((6, 3, 0), (6, 3, 9)),
)


class CpuClock:
    """Runs the perf_event program with descriptor ``program`` at a fixed rate, on each CPU that is online and not idle.

    The clock stops when this process ends. The caller keeps the descriptor, and may close it while the clock runs.
    """

    def __init__(self, program: int) -> None:
        self._program = program
        self._events: dict[int, list[int]] = {}
        self.hz = 0

    def set(self, hz: int) -> None:
        """Sets the rate to ``hz``; 0 stops the clock. After a failure the clock is stopped.

        Raises UsageError for a rate below 0 or above MAX_HZ, PrivilegeError, AttachError.
        """
        if not 0 <= hz <= MAX_HZ:
            raise UsageError(f"the sampler's clock cannot run at {hz} Hz", hint=f"use 0 to {MAX_HZ}")
        self.close()
        self.hz = hz
        self.refresh()

    def refresh(self) -> None:
        """Starts the clock on CPUs that came online, and drops CPUs that went offline. Raises PrivilegeError,
        AttachError.
        """
        online = set(online_cpus()) if self.hz else set()
        for cpu in self._events.keys() - online:
            _close(self._events.pop(cpu))
        try:
            for cpu in sorted(online - self._events.keys()):
                if opened := self._open(cpu):
                    self._events[cpu] = opened
        except OSError as e:
            self.close()
            raise refused(e, "the sampler's clock cannot be started") from e

    def close(self) -> None:
        self.hz = 0
        while self._events:
            _close(self._events.popitem()[1])

    @property
    def cpus(self) -> list[int]:
        """Returns the CPUs on which the clock ticks."""
        return sorted(self._events)

    def _open(self, cpu: int) -> list[int]:
        try:
            event = open_cpu_clock(cpu, self.hz)
        except OSError as e:
            # The CPU went offline meanwhile.
            if e.errno == errno.ENODEV:
                return []
            raise
        try:
            held = self._attach(event)
        except OSError:
            os.close(event)
            raise
        try:
            enable(event)
        except OSError:
            _close(held)
            raise
        return held

    def _attach(self, event: int) -> list[int]:
        try:
            return [syscalls.link_perf_event(self._program, event, 0), event]
        except OSError as e:
            # Kernels before 5.15 have no links to perf events.
            if e.errno != errno.EINVAL:
                raise
        set_program(event, self._program)
        return [event]


def open_cpu_clock(cpu: int, hz: int) -> int:
    """Returns a disabled event that overflows ``hz`` times a second on ``cpu``. Raises OSError."""
    fields = (_TYPE_SOFTWARE, ATTR_SIZE, _COUNT_CPU_CLOCK, _SECOND_NS // hz, 0, 0, _DISABLED | _EXCLUDE_IDLE)
    return perf_event_open(struct.pack("<IIQQQQQ", *fields), cpu)


def known_to_freeze(release: str) -> str | None:
    """Returns why a program that reads user memory in an interrupt may freeze this release; None if it cannot.

    With hardened usercopy, this read takes a lock on Linux 5.19 to 6.3 that the interrupted code may hold. Fixed by
    Linux kernel commit d319f344561d ("mm: Fix copy_from_user_nofault().") (in v6.4, 6.3.10 and 6.1.36).
    """
    match = _RELEASE.match(release)
    if match is None:
        return None
    version = tuple(int(part or 0) for part in match.groups())
    if any(first <= version <= last for first, last in _FREEZING):
        return f"Linux {release} may freeze when the sampler reads user memory (fixed in 6.1.36, 6.3.10 and 6.4)"
    return None


def running_release() -> str:
    """Returns the upstream release of the running kernel. Debian and Ubuntu show only the first release of its series
    in uname -r.
    """
    system = os.uname()
    # `uname -v` prints "... Debian 6.1.99-1 (2024-07-15)".
    if match := re.search(r"\bDebian (\d+\.\d+\.\d+)", system.version):
        return match[1]
    try:
        # The file reads "Ubuntu 6.2.0-39.40-generic 6.2.16".
        signed = _SIGNATURE.read_text().split()
    except OSError:
        return system.release
    return signed[-1] if len(signed) == 3 and _RELEASE.match(signed[-1]) else system.release


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
