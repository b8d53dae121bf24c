"""Makes the conditions of processes from two readings: values of the later reading, and differences to the earlier
reading.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Collector, Row
from probing.daemon.processes.conditions.counters import idle_ns, neighbours_of
from probing.daemon.stack_wire import Load
from probing.diagnosis.facts import Condition

__all__ = ("EarlierReadings", "conditions_of", "idle_cpus_of", "read_conditions")

# How long a reading is kept, ns. It is longer than the time between two looks at a slow job, so that the next look can
# use the reading.
_OLDEST_NS = 90_000_000_000
# The minimum time between two readings whose differences count, ns.
_LEAST_NS = 1_000_000_000
_MAX_JOBS = 64
_NAMES = [field.name for field in fields(Condition)]
_COUNTERS = _NAMES[_NAMES.index("interval_ns") + 1 : _NAMES.index("neighbours")]
_MADE = {"interval_ns", "asleep_since_ns", "children", "neighbours", *_COUNTERS}
_PLAIN = [name for name in _NAMES if name not in _MADE]
_Reading = Mapping[str, Any]
# A CPU with at least this share of idle time is free for a thread that waits for another CPU.
_FREE = 0.3


class EarlierReadings:
    """Keeps a reading of each job, so that the next look can compute what changed since then. Thread-safe.

    A reading is an answer of ``read_conditions``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Reading] = OrderedDict()

    def keep(self, job: str, reading: _Reading) -> None:
        """Keeps ``reading`` as the reading of ``job``."""
        with self._lock:
            self._keep(job, reading)

    def extend(self, job: str, readings: Sequence[_Reading]) -> list[_Reading]:
        """Returns the kept reading and the last of ``readings``, if the kept reading is 1 to 90 s older; else
        ``readings`` alone.

        Keeps the last of ``readings`` for later looks when the kept reading is older than 45 s, or absent.
        """
        last = readings[-1]
        with self._lock:
            kept = self._kept.get(job)
            age_ns = _taken_ns(last) - _taken_ns(kept) if kept else _OLDEST_NS
            if age_ns > _OLDEST_NS // 2:
                self._keep(job, last)
        return [kept, last] if kept and _LEAST_NS <= age_ns <= _OLDEST_NS else list(readings)

    def _keep(self, job: str, reading: _Reading) -> None:
        self._kept[job] = reading
        self._kept.move_to_end(job)
        # This drops readings of jobs that ended.
        old = [name for name, one in self._kept.items() if _taken_ns(reading) - _taken_ns(one) > _OLDEST_NS]
        for name in [*old, *list(self._kept)[:-_MAX_JOBS]]:
            self._kept.pop(name, None)


def _taken_ns(reading: _Reading) -> int:
    """Returns the time at which ``reading`` was taken, CLOCK_MONOTONIC ns; 0 when it has no process."""
    return max((int(one["mono_ns"]) for one in reading["processes"]), default=0)


def read_conditions(collector: Collector, job: str, timeout: float) -> _Reading:
    """Returns an answer of ``CollectorClient.conditions``, with ``idle``: the time that each CPU was idle, ns since
    boot. ``timeout`` in seconds. Raises ProbingError."""
    found = collector.conditions([], job, timeout)
    return {**found, "idle": _idle_ns(), "idle_at_ns": time.monotonic_ns()}


def _idle_ns() -> dict[int, int]:
    # psutil lists the CPUs that are online, without their numbers.
    try:
        with open("/proc/stat", "rb") as file:
            return idle_ns(file.read(1 << 20))
    except OSError:
        return {}


def idle_cpus_of(first: _Reading | None, second: _Reading) -> tuple[int, ...] | None:
    """Returns the CPUs that were idle for at least 30 % of the time between two answers of ``read_conditions``.

    None if an answer lacks the idle times.
    """
    before, now = (first or {}).get("idle"), second.get("idle")
    if first is None or not before or not now:
        return None
    least = _FREE * (second["idle_at_ns"] - first["idle_at_ns"])
    return tuple(cpu for cpu, idle in now.items() if cpu in before and idle - before[cpu] >= max(least, 1))


def conditions_of(first: _Reading | None, second: _Reading) -> dict[Key, Condition]:
    """Returns the condition of each process in ``second``, with the differences to ``first`` if there is one.

    Both are answers of ``read_conditions``.
    """
    before = {Key.of(one): one for one in first["processes"]} if first else {}
    loads = _loads(first), _loads(second)
    # The times in readings are CLOCK_MONOTONIC.
    clock_ns = time.time_ns() - time.monotonic_ns()
    return {Key.of(one): _condition(before.get(Key.of(one)), one, loads, clock_ns) for one in second["processes"]}


def _condition(before: Row | None, now: Row, loads: tuple[Sequence[Load], Sequence[Load]], clock_ns: int) -> Condition:
    found: dict[str, Any] = {name: now.get(name) for name in _PLAIN}
    found["children"] = tuple((name, pid, state) for name, pid, state in now.get("children") or ())
    if now.get("asleep_ns") is not None:
        found["asleep_since_ns"] = now["mono_ns"] - now["asleep_ns"] + clock_ns
    if before is not None:
        found["interval_ns"] = now["mono_ns"] - before["mono_ns"]
        found |= {name: _difference(before.get(name), now.get(name)) for name in _COUNTERS}
        if loads[0] and loads[1]:
            found["neighbours"] = tuple(
                neighbours_of(*loads, now["pid"], {now["last_cpu"]} if now.get("last_cpu") is not None else set())
            )
    return Condition(**found)


def _difference(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(0, now - before)


def _loads(reading: _Reading | None) -> list[Load]:
    return [Load(*row) for row in (reading or {}).get("loads") or ()]
