"""Parses the counters of a process or thread in /proc into numbers. A value that the kernel does not show is None.

Formats: proc(5), Documentation/scheduler/sched-stats.rst. Each number and each text is limited in length.

``asleep_ns`` computes the time since a thread last ran, from ``se.exec_start`` of its sched file (CONFIG_SCHED_DEBUG,
kernel/sched/debug.c). This time is on the task clock of the CPU on which the thread ran. The task clocks of two CPUs
differ by the time that interrupts and the hypervisor took from each CPU since boot (kernel/sched/core.c,
update_rq_clock_task). If the clocks are far apart, the reader moves to the thread's CPU for a moment to read its clock.

``neighbours_of`` compares two lists of all processes of the machine, and finds the other processes that used the CPUs
of a process.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import TICK_NS, clean_text, parse_stat
from probing.daemon.processes.target import Target
from probing.daemon.stack_wire import Load

__all__ = (
    "asleep_ns",
    "exec_start_ns",
    "idle_ns",
    "neighbours_of",
    "parse_io",
    "parse_schedstat",
    "parse_task_stat",
    "read_loads",
    "status_fields",
    "taken_ns",
)

_EXEC_START = re.compile(rb"^se\.exec_start\s*:\s*(\d{1,15})\.(\d{6})", re.MULTILINE)
# Fields after the name in /proc/PID/stat, counted from 0.
_MAJOR_FAULTS, _USER, _SYSTEM, _PROCESSOR = 9, 11, 12, 36


class _TaskStat(NamedTuple):
    """The counters of a stat file. ``cpu_ns`` is counted in ticks of 10 ms. ``processor``: the CPU on which the thread
    last ran.
    """

    name: str
    state: str
    major_faults: int
    cpu_ns: int
    processor: int | None


def parse_task_stat(data: bytes) -> _TaskStat | None:
    """Returns the counters of a stat file of a process or thread; None when the file is cut short."""
    head, _, rest = data.rpartition(b")")
    fields = rest.split()
    name = head.partition(b" (")[2]
    try:
        cpu = (_number(fields[_USER]) + _number(fields[_SYSTEM])) * TICK_NS
        processor = _number(fields[_PROCESSOR]) if len(fields) > _PROCESSOR else None
        return _TaskStat(
            clean_text(name[:64], 32), fields[0][:1].decode("ascii"), _number(fields[_MAJOR_FAULTS]), cpu, processor
        )
    except (ValueError, IndexError):
        return None


def parse_schedstat(data: bytes) -> tuple[int | None, int | None]:
    """Returns the time on a CPU and the time spent runnable without a CPU, ns."""
    try:
        cpu, delay = data.split()[:2]
        return _number(cpu), _number(delay)
    except ValueError:
        return None, None


def exec_start_ns(sched: bytes) -> int | None:
    """Returns ``se.exec_start`` of a sched file: when the thread last ran, ns on the task clock of its CPU."""
    match = _EXEC_START.search(sched[: 8 << 10])
    return int(match[1]) * 1_000_000 + int(match[2]) if match else None


def parse_io(data: bytes) -> tuple[int | None, int | None, int | None]:
    """Returns three byte counts of a process: all read calls, all write calls, and reads from storage. The first two
    include caches and pipes."""
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
    """Returns for each CPU the time since boot that interrupts and the hypervisor took, ns, from /proc/stat."""
    # Fields 6 to 8 are irq, softirq and steal.
    return dict(_cpu_times(stat, slice(6, 9)))


def idle_ns(stat: bytes) -> dict[int, int]:
    """Returns for each CPU the idle time since boot, ns, from /proc/stat; waiting for a disk counts as idle."""
    return dict(_cpu_times(stat, slice(4, 6)))


def _cpu_times(stat: bytes, chosen: slice) -> Iterator[tuple[int, int]]:
    """Yields each CPU with the sum, in ns, of the ``chosen`` fields of its line in /proc/stat (fs/proc/stat.c)."""
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
                continue  # the value stays unknown
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


_BYTES = 16 << 10
# The maximum bytes of /proc/stat that are read: enough for the lines of 1,000 CPUs.
_STAT_BYTES = 128 << 10
# The reader moves to the CPU on which the thread last ran only if the task clocks of that CPU and of its own CPU differ
# by more than this, ns.
_CLOSE_NS = 20_000_000


def asleep_ns(target: Target, tid: int, cpu: int | None) -> int | None:
    """Returns a lower bound of the time since thread ``tid`` last ran, ns; None if the kernel does not show the time.

    ``cpu``: the CPU on which the thread last ran. The caller must know that the thread is not running. Raises
    ProcessGone.
    """
    then = exec_start_ns(_read(target, f"task/{tid}/sched"))
    if not then:
        return None
    now, own_cpu = _now()
    apart = _apart_ns(cpu, own_cpu)
    if apart > _CLOSE_NS and cpu is not None:
        with _on(cpu):
            now, own_cpu = _now()
        apart = 0 if own_cpu == cpu else apart
    return None if now is None else max(0, now - then - apart)


def _now() -> tuple[int | None, int | None]:
    """Returns (ns, CPU): when the calling thread was last put on its CPU, by the CPU's task clock, and the CPU."""
    tid = threading.get_native_id()
    with Target(os.getpid()) as own:
        stat = parse_task_stat(_read(own, f"task/{tid}/stat"))
        return exec_start_ns(_read(own, f"task/{tid}/sched")), stat.processor if stat else None


def _apart_ns(cpu: int | None, other: int | None) -> int:
    try:
        with open("/proc/stat", "rb", buffering=0) as file:
            taken = taken_ns(file.read(_STAT_BYTES) or b"")
    except OSError:
        taken = {}
    return abs(taken.get(cpu, 0) - taken.get(other, 0))


@contextmanager
def _on(cpu: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    try:
        # The kernel refuses a CPU that is not in the reader's cpuset. The reader then stays on its CPU.
        with suppress(OSError):
            os.sched_setaffinity(0, {cpu})
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _read(target: Target, name: str) -> bytes:
    try:
        return target.read(name, _BYTES)
    except ProbingError:
        return b""


MAX_PIDS = 16_384
MAX_NEIGHBOURS = 5


def read_loads(deadline: float, proc: Path = Path("/proc")) -> list[Load] | None:
    """Returns the loads of all processes that used a CPU, including kernel threads.

    Returns None if the reading is not complete at ``deadline`` (time.monotonic()): a process that an incomplete list
    lacks would seem new in the next list.
    """
    found = []
    for name in os.listdir(proc)[:MAX_PIDS]:  # noqa: PTH208
        if time.monotonic() > deadline:
            return None
        if name.isdigit() and (load := _load(proc / name / "stat")) is not None and load.cpu_ns:
            found.append(load)
    return found


def _load(path: Path) -> Load | None:
    try:
        with path.open("rb", buffering=0) as file:
            data = file.read(4_096) or b""
        who, used = parse_stat(data), parse_task_stat(data)
    except (OSError, ProbingError):
        return None  # the process ended between the listing and the read
    return Load(who.pid, who.start_ns, used.name, used.processor, used.cpu_ns) if used else None


def neighbours_of(
    first: Sequence[Load], second: Sequence[Load], pid: int, cpus: Collection[int]
) -> list[tuple[str, int, int]]:
    """Returns (name, pid, CPU ns) of the five processes, other than ``pid``, that used ``cpus`` most between two
    readings. The CPU time of a new process counts from its start.
    """
    before = {(load.pid, load.start_ns): load.cpu_ns for load in first}
    used = [
        (load.name, load.pid, load.cpu_ns - before.get((load.pid, load.start_ns), 0))
        for load in second
        if load.pid != pid and load.cpu in cpus
    ]
    return sorted((u for u in used if u[2] > 0), key=lambda u: -u[2])[:MAX_NEIGHBOURS]
