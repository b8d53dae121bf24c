"""Which other processes used the CPUs of a process: the difference of two lists of all processes of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.conditions.counters import parse_task_stat
from probing.daemon.processes.procfs import parse_stat

__all__ = ("Load", "neighbours_of", "read_loads")

MAX_PIDS = 16_384
MAX_NEIGHBOURS = 5


class Load(NamedTuple):
    """A process: ``cpu_ns`` since its start in ticks of 10 ms, and ``cpu``, on which its main thread last ran."""

    pid: int
    start_ns: int
    name: str
    cpu: int | None
    cpu_ns: int


def read_loads(deadline: float, proc: Path = Path("/proc")) -> list[Load] | None:
    """Returns all processes that used a CPU, kernel threads among them.

    None when that takes longer than until ``deadline`` (time.monotonic()): a process that one of two lists lacks would
    seem to be new.
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
        return None  # it ended between the listing and the read
    return Load(who.pid, who.start_ns, used.name, used.processor, used.cpu_ns) if used else None


def neighbours_of(
    first: Sequence[Load], second: Sequence[Load], pid: int, cpus: Collection[int]
) -> list[tuple[str, int, int]]:
    """Returns name, pid and CPU ns of the five processes but ``pid`` that used ``cpus`` most between two readings.

    A process that is new counts from its start.
    """
    before = {(load.pid, load.start_ns): load.cpu_ns for load in first}
    used = [
        (load.name, load.pid, load.cpu_ns - before.get((load.pid, load.start_ns), 0))
        for load in second
        if load.pid != pid and load.cpu in cpus
    ]
    return sorted((u for u in used if u[2] > 0), key=lambda u: -u[2])[:MAX_NEIGHBOURS]
