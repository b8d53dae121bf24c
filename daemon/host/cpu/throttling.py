"""How often and for how long the control groups of processes were throttled, and their quota of CPUs.

Processes of one group share a reading: it is made once in a round.
"""

from __future__ import annotations

import os

from probing.daemon.host.cpu.task_stat import ABSENT
from probing.daemon.processes.conditions.cgroups import Group, cpu_limits, group_of
from probing.daemon.processes.conditions.mounts import MAX_MOUNTINFO, Mount, parse_mounts

__all__ = ("Throttling",)

MAX_GROUPS = 1_024
# Mounts of control groups change only when somebody administers the machine.
_MOUNTS_ROUNDS = 60
_NOTHING = (ABSENT, ABSENT, ABSENT)


class Throttling:
    """``proc``: where procfs is mounted."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._round = 0
        self._mounts: list[Mount] = []
        self._groups: dict[bytes, Group | None] = {}
        self._read: dict[bytes, tuple[int, int, int]] = {}

    def begin(self) -> None:
        """Begins a round: what was read before is forgotten."""
        self._read.clear()
        if self._round % _MOUNTS_ROUNDS == 0:
            self._mounts, self._groups = _own_mounts(self._proc), {}
        self._round += 1

    def of(self, cgroup: bytes) -> tuple[int, int, int]:
        """Returns throttled periods, throttled ns and the quota in thousandths of a CPU, by /proc/PID/cgroup.

        Counters of a group and all above it; ABSENT where there is none.
        """
        if (found := self._read.get(cgroup)) is None:
            if len(self._read) >= MAX_GROUPS:
                return _NOTHING
            found = self._read[cgroup] = self._limits(cgroup)
        return found

    def _limits(self, cgroup: bytes) -> tuple[int, int, int]:
        if cgroup not in self._groups:
            self._groups[cgroup] = group_of("cpu", cgroup, self._mounts)
        limits = cpu_limits(self._groups[cgroup])
        count, time_ns, quota = limits["throttled"], limits["throttled_ns"], limits["cpu_quota"]
        return (
            ABSENT if count is None else int(count),
            ABSENT if time_ns is None else int(time_ns),
            ABSENT if quota is None else min(int(quota * 1000), 1 << 40),
        )


def _own_mounts(proc: str) -> list[Mount]:
    try:
        fd = os.open(f"{proc}/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        return parse_mounts(file.read(MAX_MOUNTINFO))
