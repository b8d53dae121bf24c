"""Joins CPU, memory and GPUs to the ranks that use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from probing.client.collectives.ranks import process_of
from probing.client.collectives.silence import Process
from probing.client.render.rows import Row
from probing.client.top.history import Series

__all__ = ("CPU_FIELDS", "GPU_FIELDS", "HISTORIES", "Devices", "cpu_of")

CPU_FIELDS = ("cpu_pct", "rss_bytes", "threads", "delay_pct")
GPU_FIELDS = ("gpus", "gpu_pct", "gpu_used_bytes", "gpu_total_bytes", "gpu_own_bytes", "power_w", "temperature_c")
# Series of a rank by what they show.
HISTORIES = ("cpu_pct", "rss_bytes", "gpu_pct", "gpu_used_bytes", "power_w", "temperature_c", "steps_per_s")
_OF_GPU = ("gpu_pct", "gpu_used_bytes", "power_w", "temperature_c")
# A device that is silent for so long has no present value.
_STALE_NS = 15_000_000_000


class Devices:
    """The newest row of each GPU by node and UUID, and the series of its values."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[Any, Any], Row] = {}
        self._series = Series()

    def update(self, rows: Iterable[Row], nodes: Iterable[str]) -> None:
        """Takes rows of gpu.utilization in any order; ``nodes`` are those that gave rows, others keep what they had."""
        for row in sorted(rows, key=lambda row: row["at"]):
            key = row["node"], row["uuid"]
            used = row["gpu_util_pct"] if row["gpu_util_pct"] is not None else row["sm_active_pct"]
            gpu = {**row, "gpu_pct": used, "gpu_used_bytes": row["used_bytes"]}
            for name in _OF_GPU:
                self._series.add((key, name), row["at"], gpu[name])
            if row["at"] >= self._gpus.get(key, row)["at"]:
                self._gpus[key] = gpu
        newest: dict[Any, int] = {}
        for (node, _), gpu in self._gpus.items():
            newest[node] = max(newest.get(node, 0), gpu["at"])
        asked = set(nodes)
        gone = {key for key, gpu in self._gpus.items() if key[0] in asked and gpu["at"] < newest[key[0]] - _STALE_NS}
        self._gpus = {key: gpu for key, gpu in self._gpus.items() if key not in gone}
        self._series.keep({(key, name) for key in self._gpus for name in _OF_GPU})

    def of(self, uses: Iterable[Row]) -> Row:
        """Returns GPU_FIELDS of a process from its rows of gpu.processes.

        ``gpus`` has a row for each device with its ``history``. The figures are sums over them, of utilization the mean
        and of temperature the highest.
        """
        gpus = []
        for use in sorted(uses, key=lambda use: (use["device_id"] is None, use["device_id"] or 0)):
            key = use["node"], use["uuid"]
            known: Row = self._gpus.get(key) or {"device_id": use["device_id"], "name": None}
            history = {name: self._series.of((key, name)) for name in _OF_GPU}
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
    """Returns CPU_FIELDS by process from the newest rows of cpu.utilization, with memory from process.memory else."""
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
