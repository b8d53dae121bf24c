"""Parses the counters of a process or thread in /proc: bytes in, plain numbers out; None where the kernel has none.

Formats: proc(5), Documentation/scheduler/sched-stats.rst. Each number is bounded, and so is each text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from probing.daemon.processes.procfs import TICK_NS, clean_text

__all__ = (
    "TaskStat",
    "exec_start_ns",
    "idle_ns",
    "parse_io",
    "parse_schedstat",
    "parse_task_stat",
    "status_fields",
    "taken_ns",
)

_EXEC_START = re.compile(rb"^se\.exec_start\s*:\s*(\d{1,15})\.(\d{6})", re.MULTILINE)
# Fields behind the name in /proc/PID/stat, counted from 0.
_MAJOR_FAULTS, _USER, _SYSTEM, _PROCESSOR = 9, 11, 12, 36


class TaskStat(NamedTuple):
    """``cpu_ns`` is counted in ticks of 10 ms. ``processor``: the CPU on which it last ran."""

    name: str
    state: str
    major_faults: int
    cpu_ns: int
    processor: int | None


def parse_task_stat(data: bytes) -> TaskStat | None:
    """Returns the counters of a stat file of a process or thread; None when it is cut short."""
    head, _, rest = data.rpartition(b")")
    fields = rest.split()
    name = head.partition(b" (")[2]
    try:
        cpu = (_number(fields[_USER]) + _number(fields[_SYSTEM])) * TICK_NS
        processor = _number(fields[_PROCESSOR]) if len(fields) > _PROCESSOR else None
        return TaskStat(
            clean_text(name[:64], 32), fields[0][:1].decode("ascii"), _number(fields[_MAJOR_FAULTS]), cpu, processor
        )
    except (ValueError, IndexError):
        return None


def parse_schedstat(data: bytes) -> tuple[int | None, int | None]:
    """Returns the time on the CPU and the time spent runnable without one, ns."""
    try:
        cpu, delay = data.split()[:2]
        return _number(cpu), _number(delay)
    except ValueError:
        return None, None


def exec_start_ns(sched: bytes) -> int | None:
    """Returns ``se.exec_start`` of a sched file: when the thread last ran, ns on its CPU's clock of tasks."""
    match = _EXEC_START.search(sched[: 8 << 10])
    return int(match[1]) * 1_000_000 + int(match[2]) if match else None


def parse_io(data: bytes) -> tuple[int | None, int | None, int | None]:
    """Returns the bytes of all read calls and of all write calls of a process, also on caches and pipes, and those that
    were read from storage."""
    found = _pairs(data, (b"rchar", b"wchar", b"read_bytes"))
    return found.get(b"rchar"), found.get(b"wchar"), found.get(b"read_bytes")


def status_fields(data: bytes) -> dict[str, int | str | None]:
    """Returns tracer_pid, threads, rss_bytes, swap_bytes, switches, cpus_allowed and cpu_list of a status file."""
    names = (b"TracerPid", b"Threads", b"VmRSS", b"VmSwap", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")
    found = _pairs(data, names)
    rss, swap = found.get(b"VmRSS"), found.get(b"VmSwap")
    match = re.search(rb"^Cpus_allowed_list:\s*([0-9,\-]{1,1024})$", data, re.MULTILINE)
    cpus = match[1].decode() if match else None
    voluntary = found.get(b"voluntary_ctxt_switches")
    return {
        "tracer_pid": found.get(b"TracerPid") or None,
        "threads": found.get(b"Threads"),
        "rss_bytes": None if rss is None else rss << 10,
        "swap_bytes": None if swap is None else swap << 10,
        "switches": None if voluntary is None else voluntary + found.get(b"nonvoluntary_ctxt_switches", 0),
        "cpus_allowed": _count(cpus) if cpus else None,
        "cpu_list": cpus and clean_text(cpus, 128),
    }


def taken_ns(stat: bytes) -> dict[int | None, int]:
    """Returns for each CPU the time that interrupts and the hypervisor took since boot, from /proc/stat."""
    # irq, softirq and steal.
    return dict(_cpu_times(stat, slice(6, 9)))


def idle_ns(stat: bytes) -> dict[int, int]:
    """Returns for each CPU the time that it was idle since boot, also while a disk was waited for, from /proc/stat."""
    return dict(_cpu_times(stat, slice(4, 6)))


def _cpu_times(stat: bytes, chosen: slice) -> Iterator[tuple[int, int]]:
    """Yields each CPU with the sum of fields of its line of /proc/stat (fs/proc/stat.c), ns."""
    for line in stat.split(b"\n"):
        fields = line.split()
        if len(fields) > 8 and fields[0].startswith(b"cpu") and fields[0][3:].isdigit():
            yield int(fields[0][3:]), sum(int(field) for field in fields[chosen] if field.isdigit()) * TICK_NS


def _pairs(data: bytes, names: tuple[bytes, ...]) -> dict[bytes, int]:
    found = {}
    for line in data[: 64 << 10].split(b"\n"):
        name, _, rest = line.partition(b":")
        if name in names:
            try:
                found[name] = _number(rest.split()[0])
            except (ValueError, IndexError):
                continue  # it stays unknown
    return found


def _count(cpus: str) -> int | None:
    """Returns the number of CPUs in a list such as 0-3,8."""
    total = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        try:
            total += int(last or first) - int(first) + 1
        except ValueError:
            return None
    return total


def _number(word: bytes) -> int:
    if len(word) > 20:
        raise ValueError("too many digits")
    return int(word)
