"""Keeps values of each rank over time: bounded series for sparklines, rates of counters that may restart, values of
CPU, memory and GPUs, and the progress from comm.progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any

from probing.client.collectives.ranks import process_of
from probing.client.collectives.silence import Process
from probing.client.render.rows import Row

__all__ = ("CPU_FIELDS", "HISTORIES", "Devices", "Lags", "Progress", "Rates", "Series", "cpu_of")

_MOST_VALUES = 120
_SAMPLES = 10


class Series:
    """The last _MOST_VALUES values of each key, ordered by time."""

    def __init__(self) -> None:
        self._values: dict[Hashable, deque[float | None]] = {}
        self._newest: dict[Hashable, float] = {}

    def add(self, key: Hashable, at: float, value: float | None) -> None:
        """Adds a value of time ``at`` (in any unit); ignores it if ``key`` has a value of that time or later."""
        if at <= self._newest.get(key, float("-inf")):
            return
        self._newest[key] = at
        self._values.setdefault(key, deque(maxlen=_MOST_VALUES)).append(value)

    def of(self, key: Hashable) -> tuple[float | None, ...]:
        return tuple(self._values.get(key, ()))

    def keep(self, keys: Container[Hashable]) -> None:
        """Removes all keys that are not in ``keys``."""
        for key in [key for key in self._values if key not in keys]:
            del self._values[key], self._newest[key]


class Rates:
    """The rates of counters, in events a second over the last ``window`` seconds."""

    def __init__(self, window: float) -> None:
        self._window_ns = window * 1e9
        self._seen: dict[Hashable, deque[tuple[int, int]]] = {}

    def add(self, key: Hashable, at_ns: int, count: int) -> float | None:
        """Adds a reading and returns the rate of ``key``; None for its first reading and after a counter has decreased.

        A counter that decreased has restarted, so earlier readings cannot be compared with it.
        """
        readings = self._seen.setdefault(key, deque())
        if readings and (count < readings[-1][1] or at_ns < readings[-1][0]):
            readings.clear()
        readings.append((at_ns, count))
        # One reading from before the window is kept, so that the rate covers the whole window.
        while len(readings) > 2 and readings[1][0] <= at_ns - self._window_ns:
            readings.popleft()
        (first_ns, first), (last_ns, last) = readings[0], readings[-1]
        return (last - first) * 1e9 / (last_ns - first_ns) if last_ns > first_ns else None

    def keep(self, keys: Container[Hashable]) -> None:
        """Removes all keys that are not in ``keys``."""
        for key in [key for key in self._seen if key not in keys]:
            del self._seen[key]


class Lags:
    """The lag of each rank, ns: how much later than the median rank it calls, as the median over the last samples."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, deque[int]] = {}
        self._last: dict[Hashable, int] = {}

    def add(self, key: Hashable, seq: int, lag_ns: int) -> None:
        """Adds the lag in operation ``seq``; each operation is counted once."""
        if self._last.get(key) != seq:
            self._last[key] = seq
            self._samples.setdefault(key, deque(maxlen=_SAMPLES)).append(lag_ns)

    def of(self, key: Hashable) -> int | None:
        values = sorted(self._samples.get(key, ()))
        return values[(len(values) - 1) // 2] if values else None

    def keep(self, keys: Container[Hashable]) -> None:
        """Removes all keys that are not in ``keys``."""
        for key in [key for key in self._samples if key not in keys]:
            del self._samples[key], self._last[key]


CPU_FIELDS = ("cpu_pct", "rss_bytes", "threads", "delay_pct")
# The series of a rank, each named after the value that it records.
HISTORIES = ("cpu_pct", "rss_bytes", "gpu_pct", "gpu_used_bytes", "power_w", "temperature_c", "steps_per_s")
_OF_GPU = ("gpu_pct", "gpu_used_bytes", "power_w", "temperature_c")
# A device is dropped if its newest row is this much older than the newest row of its node, ns.
_STALE_NS = 15_000_000_000


class Devices:
    """The newest row of each GPU by node and UUID, and the series of the GPU's values."""

    def __init__(self, histories: Container[str] = HISTORIES) -> None:
        self._histories = [name for name in _OF_GPU if name in histories]
        self._gpus: dict[tuple[Any, Any], Row] = {}
        self._series = Series()

    def update(self, rows: Iterable[Row], nodes: Iterable[str]) -> None:
        """Adds rows of gpu.utilization in any order; drops GPUs of ``nodes`` that have had no row for 15 s."""
        for row in sorted(rows, key=lambda row: row["at"]):
            key = row["node"], row["uuid"]
            used = row["gpu_util_pct"] if row["gpu_util_pct"] is not None else row["sm_active_pct"]
            gpu = {**row, "gpu_pct": used, "gpu_used_bytes": row["used_bytes"]}
            for name in self._histories:
                self._series.add((key, name), row["at"], gpu[name])
            if row["at"] >= self._gpus.get(key, row)["at"]:
                self._gpus[key] = gpu
        newest: dict[Any, int] = {}
        for (node, _), gpu in self._gpus.items():
            newest[node] = max(newest.get(node, 0), gpu["at"])
        asked = set(nodes)
        gone = {key for key, gpu in self._gpus.items() if key[0] in asked and gpu["at"] < newest[key[0]] - _STALE_NS}
        self._gpus = {key: gpu for key, gpu in self._gpus.items() if key not in gone}
        self._series.keep({(key, name) for key in self._gpus for name in self._histories})

    def of(self, uses: Iterable[Row]) -> Row:
        """Returns the fields of ``top`` about the GPUs of a process, from its rows of gpu.processes.

        ``gpus`` has a row with ``history`` for each device. Figures are sums over the devices, except utilizations (the
        mean) and temperature (the highest).
        """
        gpus = []
        for use in sorted(uses, key=lambda use: (use["device_id"] is None, use["device_id"] or 0)):
            key = use["node"], use["uuid"]
            known: Row = self._gpus.get(key) or {"device_id": use["device_id"], "name": None}
            history = {name: self._series.of((key, name)) for name in self._histories}
            gpus.append({**known, "own_bytes": use["used_bytes"], "sm_pct": use["sm_pct"], "history": history})
        used = [gpu["gpu_pct"] for gpu in gpus if gpu.get("gpu_pct") is not None]
        return {
            "gpus": gpus,
            "gpu_pct": sum(used) / len(used) if used else None,
            "gpu_used_bytes": _total(gpus, "gpu_used_bytes"),
            "gpu_total_bytes": _total(gpus, "total_bytes"),
            "gpu_own_bytes": _total(gpus, "own_bytes"),
            "power_w": _total(gpus, "power_w"),
            "temperature_c": max(
                (gpu["temperature_c"] for gpu in gpus if gpu.get("temperature_c") is not None), default=None
            ),
        }


def cpu_of(rows: Iterable[Row], memory: Iterable[Row]) -> Mapping[Process, Row]:
    """Returns CPU_FIELDS by process from ``rows``, the newest rows of cpu.utilization. If the memory of a process is
    NULL in them, it is taken from ``memory``, rows of process.memory.
    """
    found: dict[Process, Row] = {
        process_of(row): {**dict.fromkeys(CPU_FIELDS), "rss_bytes": row["rss_bytes"]} for row in memory
    }
    for row in sorted(rows, key=lambda row: row["at"]):
        known = found.get(process_of(row), {})
        resident = row["rss_kb"] * 1024 if row["rss_kb"] is not None else known.get("rss_bytes")
        found[process_of(row)] = {
            "cpu_pct": row["cpu_pct"],
            "rss_bytes": resident,
            "threads": row["thread_count"],
            "delay_pct": row["delay_pct"],
        }
    return found


def _total(gpus: Iterable[Row], name: str) -> float | None:
    known = [gpu[name] for gpu in gpus if gpu.get(name) is not None]
    return sum(known) if known else None


_Group = tuple[Any, ...]


class Progress:
    """Computes rates and lags from the rows of comm.progress of all nodes, from one refresh to the next."""

    def __init__(self, window: float) -> None:
        """``window``: seconds over which rates are computed."""
        self._rates = Rates(window)
        self._lags = Lags()

    def calls(self, rows: Iterable[Row]) -> dict[Process, Row]:
        """Returns collectives_per_s and last_age_ns by process; the first refresh gives no rate."""
        found: dict[Process, Row] = {}
        totals: dict[tuple[Any, ...], int] = {}
        for row in rows:
            key = (*process_of(row), row["start_ns"])
            totals[key] = totals.get(key, 0) + (row["calls"] or 0)
            own = found.setdefault(process_of(row), {"now_ns": row["now_ns"], "last_age_ns": None, "key": key})
            if row["call_ns"] is not None:
                age = max(0, row["now_ns"] - row["call_ns"])
                own["last_age_ns"] = age if own["last_age_ns"] is None else min(own["last_age_ns"], age)
        for own in found.values():
            own["collectives_per_s"] = self._rates.add(own["key"], own["now_ns"], totals[own["key"]])
        self._rates.keep(totals)
        return found

    def lags(self, rows: Iterable[Row]) -> dict[Process, int]:
        """Returns the worst lag over the communicators of each process, ns.

        Only ranks with the same last operation are compared. Between nodes a lag includes the difference of the clocks.
        """
        same: dict[_Group, list[Row]] = {}
        keys = set()
        for row in rows:
            keys.add(_member(row))
            if row["seq"] is not None and row["call_ns"] is not None and (row["size"] or 2) > 1:
                same.setdefault((row["job"], row["run"], row["comm"], row["seq"]), []).append(row)
        for (_, _, _, seq), members in same.items():
            if len(members) < 2:
                continue
            calls = sorted(row["call_ns"] for row in members)
            middle = calls[(len(calls) - 1) // 2]
            for row in members:
                self._lags.add(_member(row), seq, row["call_ns"] - middle)
        self._lags.keep(keys)
        found: dict[Process, int] = {}
        for node, pid, start_ns, comm in keys:
            lag = self._lags.of((node, pid, start_ns, comm))
            if lag is not None:
                found[node, pid] = max(lag, found.get((node, pid), lag))
        return found


def _member(row: Row) -> tuple[str, int, int, Any]:
    return row["node"], row["pid"], row["start_ns"], row["comm"]
