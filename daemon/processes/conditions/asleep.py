"""How long ago a thread last ran, from ``se.exec_start`` of its sched file (CONFIG_SCHED_DEBUG, kernel/sched/debug.c).

That time is on the task clock of the CPU on which the thread ran. The task clocks of two CPUs differ by the time that
interrupts and the hypervisor took from each since boot (kernel/sched/core.c, update_rq_clock_task). So it is compared
with the clock of the same CPU: the reader runs there for a moment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from probing.api.errors import ProbingError
from probing.daemon.processes.conditions.counters import exec_start_ns, parse_task_stat, taken_ns
from probing.daemon.processes.target import Target

__all__ = ("asleep_ns",)

_BYTES = 16 << 10
# A line of /proc/stat for each of 1,000 CPUs.
_STAT_BYTES = 128 << 10
# Clocks that are closer than this count as one.
_CLOSE_NS = 20_000_000


def asleep_ns(target: Target, tid: int, cpu: int | None) -> int | None:
    """Returns for how long the thread ``tid``, which last ran on ``cpu`` and does not run, has not run, at least.

    None: the kernel does not show it. Raises ProcessGone.
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
    """When this thread was last put on its CPU, on that CPU's clock, and the CPU."""
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
        # Refused where the reader's cpuset lacks this CPU.
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
