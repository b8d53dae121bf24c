"""Reads, in a reader, memory, disks and pressure of the node, and their use by watched processes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from probing.api.errors import ProbingError
from probing.daemon.host.node.kernel_files import (
    Groups,
    Pressure,
    parse_diskstats,
    parse_io_counters,
    parse_kilobytes,
    parse_named,
    parse_pressure,
)
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.conditions.mounts import MAX_MOUNTINFO, parse_mounts
from probing.daemon.processes.procfs import TICK_NS
from probing.daemon.processes.target import Target

__all__ = ("MEMINFO", "VMSTAT", "NodeReader", "answer_node")

MEMINFO = {
    "MemTotal": "total_bytes",
    "MemAvailable": "available_bytes",
    "MemFree": "free_bytes",
    "Cached": "cached_bytes",
    "AnonPages": "anon_bytes",
    "Shmem": "shmem_bytes",
    "Dirty": "dirty_bytes",
    "Writeback": "writeback_bytes",
    "Slab": "slab_bytes",
    "Committed_AS": "committed_bytes",
    "SwapTotal": "swap_total_bytes",
    "SwapFree": "swap_free",
}
"""Names of lines of meminfo, and the column of host.memory for each."""
VMSTAT = {"pswpin": "swap_in_pages", "pswpout": "swap_out_pages", "oom_kill": "oom_kills", "pgmajfault": "major_faults"}
MAX_TARGETS = 1_024
MAX_DISKS = 256
_BYTES = 256 << 10
_RESOURCES = ("cpu", "memory", "io", "irq")
# Names of block devices that are not disks, or that only show the content of a file (loop).
_NO_DISK = re.compile(r"(?:loop|ram|fd|sr)\d+$")
# Index of delayacct_blkio_ticks in stat, counted from 0 after the name; proc(5).
_IO_DELAY = 39


class NodeReader:
    """Answers the request ``node``. ``proc`` and ``sys``: the mount points of procfs and sysfs."""

    def __init__(self, proc: str = "/proc", sys: str = "/sys") -> None:
        self._proc, self._sys = Path(proc), Path(sys)

    def answer(self, request: Header) -> Message:
        """Answers the request ``node`` {targets: [[pid, start_ns], ...], timeout_ms}. The payload is JSON with:

        ``mono_ns``; ``memory`` and ``vm``: numbers by MEMINFO and VMSTAT; ``pressure`` by resource; ``disks``: counters
        by name, with ``life``; ``processes``: for each target ``io``, ``io_delay_ns``, ``memory_group`` and
        ``pressure_group``, or null if it was not read; ``memory_groups`` and ``pressure_groups``: the values of
        ``kernel_files.Groups``.
        """
        deadline = time.monotonic() + min(int(request.get("timeout_ms") or 500), 30_000) / 1000
        groups = Groups(parse_mounts(self._read("self/mountinfo", MAX_MOUNTINFO)))
        memory = parse_kilobytes(self._read("meminfo"), MEMINFO)
        vm = parse_named(self._read("vmstat"), VMSTAT)
        found: dict[str, object] = {
            "mono_ns": time.monotonic_ns(),
            "memory": {MEMINFO[name]: value for name, value in memory.items()},
            "vm": {VMSTAT[name]: value for name, value in vm.items()},
            "pressure": self._pressure(),
            "disks": self._disks(),
        }
        delays = self._read("sys/kernel/task_delayacct").strip() != b"0"
        found["processes"] = [
            self._process(int(pid), int(start_ns), groups, delays) if time.monotonic() < deadline else None
            for pid, start_ns in request.get("targets", ())[:MAX_TARGETS]
        ]
        found |= {"memory_groups": groups.memory, "pressure_groups": groups.pressure}
        return Message({}, json.dumps(found, separators=(",", ":")).encode())

    def _pressure(self) -> dict[str, Pressure]:
        read = {name: parse_pressure(self._read(f"pressure/{name}")) for name in _RESOURCES}
        return {name: pressure for name, pressure in read.items() if pressure}

    def _disks(self) -> dict[str, dict[str, int]]:
        # Partitions are left out, since the traffic of a disk includes the traffic of its partitions.
        try:
            whole = set(os.listdir(self._sys / "block"))  # noqa: PTH208
        except OSError:
            whole = set()
        disks = parse_diskstats(self._read("diskstats"))
        names = [name for name in disks if (not whole or name in whole) and not _NO_DISK.match(name)]
        return {
            name: {**disks[name], "life": self._life(name)} for name in names[:MAX_DISKS] if any(disks[name].values())
        }

    def _life(self, name: str) -> int:
        # diskseq is a number that no other device had since the boot (Linux 5.15).
        word = _read(self._sys / "block" / name / "diskseq", 64).strip()
        return int(word) if word.isdigit() and len(word) < 20 else 0

    def _process(self, pid: int, start_ns: int, groups: Groups, delays: bool) -> dict[str, object] | None:
        try:
            with Target(pid, start_ns) as target:
                memory, pressure = groups.add(target.read("cgroup", 64 << 10))
                fields = target.read("stat", 4_096).rpartition(b")")[2].split()
                found: dict[str, object] = {"memory_group": memory, "pressure_group": pressure, "io": {}}
                if delays and len(fields) > _IO_DELAY and fields[_IO_DELAY].isdigit():
                    found["io_delay_ns"] = int(fields[_IO_DELAY][:15]) * TICK_NS
                found["io"] = _io(target)
                return found
        except ProbingError:
            return None  # the process ended, or cannot be read

    def _read(self, name: str, limit: int = _BYTES) -> bytes:
        return _read(self._proc / name, limit)


def answer_node(request: Header) -> Message:
    """Returns ``NodeReader.answer`` for this machine."""
    return NodeReader().answer(request)


def _io(target: Target) -> dict[str, int]:
    try:
        return parse_io_counters(target.read("io", 4_096))
    except ProbingError:
        return {}  # this file needs a permission that the other files do not need


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(limit) or b""
    except OSError:
        return b""  # the kernel lacks the file, or it was removed
