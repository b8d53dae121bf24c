"""Memory and pressure of the control groups of processes, versions 1 and 2.

Formats: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, accounting/psi.rst. A file that a kernel lacks,
or a group that is removed while it is read, gives no value.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from probing.daemon.host.node.kernel_files import parse_named, parse_pressure
from probing.daemon.processes.conditions.cgroups import Group, first_number, group_of, number_in, read_group_file
from probing.daemon.processes.conditions.mounts import Mount
from probing.daemon.processes.procfs import clean_text

__all__ = ("Groups",)

MAX_GROUPS = 256
_RESOURCES = ("cpu", "memory", "io", "irq")
# Version 1 has no word for "no limit": it shows a number near 2 ** 63.
_UNLIMITED = 1 << 60
_STAT_V2 = {
    "anon": "anon_bytes",
    "file": "cached_bytes",
    "shmem": "shmem_bytes",
    "file_dirty": "dirty_bytes",
    "file_writeback": "writeback_bytes",
    "slab": "slab_bytes",
}
_STAT_V1 = {
    "total_rss": "anon_bytes",
    "total_cache": "cached_bytes",
    "total_shmem": "shmem_bytes",
    "total_dirty": "dirty_bytes",
    "total_writeback": "writeback_bytes",
    "total_swap": "swap_used_bytes",
}


class Groups:
    """The groups of one look: each is read once. ``mounts``: those of this process."""

    def __init__(self, mounts: list[Mount]) -> None:
        self._mounts = mounts
        self._of: dict[bytes, tuple[str | None, str | None]] = {}
        self.memory: dict[str, dict[str, Any]] = {}
        self.pressure: dict[str, dict[str, Any]] = {}

    def add(self, cgroup: bytes) -> tuple[str | None, str | None]:
        """Takes /proc/PID/cgroup; returns the keys of its group in ``memory`` and in ``pressure``.

        In ``memory`` it is the group above it, or itself, whose limit is closest.
        """
        if (found := self._of.get(cgroup)) is None:
            if len(self._of) >= MAX_GROUPS:
                return None, None
            found = self._of[cgroup] = self._memory(cgroup), self._pressure(cgroup)
        return found

    def _memory(self, cgroup: bytes) -> str | None:
        group = group_of("memory", cgroup, self._mounts)
        if group is None:
            return None
        level = _tightest(group)
        return self._keep(self.memory, group, level, _memory_v1 if group.version == 1 else _memory_v2)

    def _pressure(self, cgroup: bytes) -> str | None:
        # Only version 2 has pressure; its hierarchy may be there beside those of version 1.
        line = next((line for line in cgroup.split(b"\n") if line.startswith(b"0::")), b"")
        group = group_of("pressure", line, self._mounts) if line else None
        return None if group is None else self._keep(self.pressure, group, 0, _pressure_of)

    def _keep(self, into: dict[str, dict[str, Any]], group: Group, level: int, read: Any) -> str | None:
        directory = group.directories[level]
        try:
            inode = Path(os.fsdecode(directory)).stat().st_ino
        except OSError:
            return None  # it was removed
        key = f"{inode}:{_level_path(group, level)}"
        if key not in into:
            if not (values := read(directory)):
                return None
            into[key] = {"path": _level_path(group, level), **values}
        return key


def _level_path(group: Group, level: int) -> str:
    """Returns the path of a group or, ``level`` above, of one that holds it, as /proc/PID/cgroup shows it."""
    parts = group.path.rstrip("/").split("/")
    return clean_text("/".join(parts[: max(1, len(parts) - level)]) or "/", 256)


def _tightest(group: Group) -> int:
    room = []
    for level, directory in enumerate(group.directories):
        used = first_number(directory, "memory.current", "memory.usage_in_bytes")
        limit = first_number(directory, "memory.max", "memory.limit_in_bytes")
        if used is not None and limit is not None and 0 < limit < _UNLIMITED:
            room.append((limit - used, level))
    return min(room, default=(0, 0))[1]


def _memory_v2(directory: bytes) -> dict[str, Any]:
    events = read_group_file(directory, "memory.events")
    stat = parse_named(read_group_file(directory, "memory.stat") or b"", _STAT_V2)
    return _known(
        used_bytes=first_number(directory, "memory.current"),
        limit_bytes=_limit(first_number(directory, "memory.max")),
        high_bytes=_limit(first_number(directory, "memory.high")),
        swap_used_bytes=first_number(directory, "memory.swap.current"),
        swap_total_bytes=_limit(first_number(directory, "memory.swap.max")),
        limit_hits=number_in(events, b"max"),
        oom_kills=number_in(events, b"oom_kill"),
        **{_STAT_V2[name]: value for name, value in stat.items()},
    )


def _memory_v1(directory: bytes) -> dict[str, Any]:
    stat = parse_named(read_group_file(directory, "memory.stat") or b"", _STAT_V1)
    return _known(
        used_bytes=first_number(directory, "memory.usage_in_bytes"),
        limit_bytes=_limit(first_number(directory, "memory.limit_in_bytes")),
        limit_hits=first_number(directory, "memory.failcnt"),
        oom_kills=number_in(read_group_file(directory, "memory.oom_control"), b"oom_kill"),
        **{_STAT_V1[name]: value for name, value in stat.items()},
    )


def _pressure_of(directory: bytes) -> dict[str, Any]:
    read = {name: parse_pressure(read_group_file(directory, f"{name}.pressure") or b"") for name in _RESOURCES}
    found = {name: pressure for name, pressure in read.items() if pressure}
    return {"resources": found} if found else {}


def _limit(number: int | None) -> int | None:
    return number if number is not None and number < _UNLIMITED else None


def _known(**values: int | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
