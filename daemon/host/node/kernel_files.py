"""Parses files of the kernel about the whole node; lines that a kernel lacks are left out.

Formats: Documentation/filesystems/proc.rst (meminfo), accounting/psi.rst, admin-guide/iostats.rst. psutil has only
seven of the twelve numbers of meminfo and two of the four of vmstat, and lacks flushes and queues of disks.

``Groups`` reads memory and pressure of the control groups of processes, versions 1 and 2. A file that the kernel lacks,
or a group that is removed while it is read, gives no value. Formats: Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/memory.rst, accounting/psi.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from probing.daemon.processes.conditions.cgroups import Group, first_number, group_of, number_in, read_group_file
from probing.daemon.processes.conditions.mounts import Mount
from probing.daemon.processes.procfs import clean_text

__all__ = (
    "Groups",
    "Pressure",
    "parse_diskstats",
    "parse_io_counters",
    "parse_kilobytes",
    "parse_named",
    "parse_pressure",
)

Pressure = dict[str, list[float]]
"""The averages over 10, 60 and 300 s in %, and the total in us, by ``some`` and ``full``."""
_DISK_FIELDS = (
    "reads",
    "reads_merged",
    "read_sectors",
    "read_ms",
    "writes",
    "writes_merged",
    "write_sectors",
    "write_ms",
    "in_flight",
    "busy_ms",
    "queue_ms",
    "discards",
    "discards_merged",
    "discard_sectors",
    "discard_ms",
    "flushes",
    "flush_ms",
)
"""Fields after the name in a line of diskstats; the last six came with Linux 4.18 (four) and 5.5 (two)."""
_LEAST_DISK_FIELDS = 11
MAX_LINES = 4_096
_MOST = (1 << 63) - 1
_PRESSURE = re.compile(
    rb"^(some|full) avg10=(\d{1,3}\.\d\d) avg60=(\d{1,3}\.\d\d) avg300=(\d{1,3}\.\d\d) total=(\d{1,20})$", re.MULTILINE
)
_KILOBYTES = re.compile(rb"^([A-Za-z_()0-9]{1,32}):[ \t]*(\d{1,15}) kB$", re.MULTILINE)
_NAMED = re.compile(rb"^([a-z_0-9]{1,48})[ :][ \t]*(\d{1,20})$", re.MULTILINE)


def parse_kilobytes(data: bytes, names: Collection[str]) -> dict[str, int]:
    """Returns the values of meminfo in ``names``, in bytes."""
    found = ((name.decode(), int(number) << 10) for name, number in _KILOBYTES.findall(data[: 64 << 10]))
    return {name: value for name, value in found if name in names}


def parse_named(data: bytes, names: Collection[str]) -> dict[str, int]:
    """Returns the numbers in ``names`` from a file with a name and a number in each line: vmstat, memory.stat."""
    found = ((name.decode(), min(int(number), _MOST)) for name, number in _NAMED.findall(data[: 64 << 10]))
    return {name: value for name, value in found if name in names}


def parse_io_counters(data: bytes) -> dict[str, int]:
    """Returns all counters of /proc/PID/io."""
    return {name.decode(): min(int(number), _MOST) for name, number in _NAMED.findall(data[:4_096])}


def parse_pressure(data: bytes) -> Pressure:
    """Returns the values of a file of pressure stall information; empty if the kernel does not measure pressure."""
    return {
        kind.decode(): [float(ten), float(sixty), float(most), float(min(int(total), _MOST))]
        for kind, ten, sixty, most, total in _PRESSURE.findall(data[:4_096])
    }


def parse_diskstats(data: bytes) -> dict[str, dict[str, int]]:
    """Returns the counters of each block device by name; lines of another form are left out."""
    found = {}
    for line in data.split(b"\n")[:MAX_LINES]:
        fields = line.split()
        numbers = fields[3 : 3 + len(_DISK_FIELDS)]
        if len(numbers) < _LEAST_DISK_FIELDS or not all(word.isdigit() and len(word) <= 19 for word in numbers):
            continue
        values = (min(int(word), _MOST) for word in numbers)
        found[clean_text(fields[2], 64)] = dict(zip(_DISK_FIELDS, values, strict=False))
    return found


MAX_GROUPS = 256
_Read = Callable[[bytes], Mapping[str, object]]
_RESOURCES = ("cpu", "memory", "io", "irq")
# A limit of this size or more means no limit: version 1 shows "no limit" as a number near 2 ** 63.
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
    """The groups of one reading, each read once. ``memory`` and ``pressure``: their values by key. ``mounts``: the
    mounts that this process, the reader, sees.
    """

    def __init__(self, mounts: list[Mount]) -> None:
        self._mounts = mounts
        self._of: dict[bytes, tuple[str | None, str | None]] = {}
        self.memory: dict[str, dict[str, object]] = {}
        self.pressure: dict[str, dict[str, object]] = {}

    def add(self, cgroup: bytes) -> tuple[str | None, str | None]:
        """Reads the group in ``cgroup``, the text of /proc/PID/cgroup. Returns its keys in ``memory`` and in
        ``pressure``.

        The key in ``memory`` belongs to the group itself or to the group above it that has the least memory left below
        its limit.
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
        # Only version 2 has pressure; its hierarchy may exist beside the hierarchies of version 1.
        line = next((line for line in cgroup.split(b"\n") if line.startswith(b"0::")), b"")
        group = group_of("pressure", line, self._mounts) if line else None
        return None if group is None else self._keep(self.pressure, group, 0, _pressure_of)

    def _keep(self, into: dict[str, dict[str, object]], group: Group, level: int, read: _Read) -> str | None:
        directory = group.directories[level]
        try:
            inode = Path(os.fsdecode(directory)).stat().st_ino
        except OSError:
            return None  # the group was removed
        key = f"{inode}:{_level_path(group, level)}"
        if key not in into:
            if not (values := read(directory)):
                return None
            into[key] = {"path": _level_path(group, level), **values}
        return key


def _level_path(group: Group, level: int) -> str:
    """Returns the path of the group ``level`` levels above ``group`` (0: itself), in the form of /proc/PID/cgroup."""
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


def _memory_v2(directory: bytes) -> dict[str, int]:
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


def _memory_v1(directory: bytes) -> dict[str, int]:
    stat = parse_named(read_group_file(directory, "memory.stat") or b"", _STAT_V1)
    return _known(
        used_bytes=first_number(directory, "memory.usage_in_bytes"),
        limit_bytes=_limit(first_number(directory, "memory.limit_in_bytes")),
        limit_hits=first_number(directory, "memory.failcnt"),
        oom_kills=number_in(read_group_file(directory, "memory.oom_control"), b"oom_kill"),
        **{_STAT_V1[name]: value for name, value in stat.items()},
    )


def _pressure_of(directory: bytes) -> dict[str, object]:
    read = {name: parse_pressure(read_group_file(directory, f"{name}.pressure") or b"") for name in _RESOURCES}
    found = {name: pressure for name, pressure in read.items() if pressure}
    return {"resources": found} if found else {}


def _limit(number: int | None) -> int | None:
    return number if number is not None and number < _UNLIMITED else None


def _known(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}
