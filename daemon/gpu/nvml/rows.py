"""Rows of gpu.utilization, gpu.devices and gpu.links from what the process answered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from probing.daemon.gpu.nvml.event_rows import RECOVERY, reasons_text

__all__ = ("BUSY_PCT", "Counters", "link_row", "utilization_row")

KIB, MIB, KB = 1024, 1 << 20, 1000
# A GPU lowers its PCIe speed while it is idle; one that is as busy as this must not.
BUSY_PCT = 50
_FLAGS = ("remap_pending", "remap_failed", "retirement_pending")
_SAME = (
    "free_bytes",
    "total_bytes",
    "used_bytes",
    "reserved_bytes",
    "gpu_util_pct",
    "mem_controller_util_pct",
    "encoder_util_pct",
    "decoder_util_pct",
    "temperature_c",
    "power_w",
    "mem_temperature_c",
    "power_limit_w",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "pstate",
    "graphics_active_pct",
    "sm_active_pct",
    "sm_occupancy_pct",
    "tensor_active_pct",
    "fp64_active_pct",
    "fp32_active_pct",
    "fp16_active_pct",
    "dram_active_pct",
    "ecc_corrected",
    "ecc_uncorrected",
    "ecc_corrected_total",
    "ecc_uncorrected_total",
    "remapped_corrected",
    "remapped_uncorrected",
    "retired_pages_sbe",
    "retired_pages_dbe",
    "pcie_replays",
)
# Time in ns that the driver adds up.
_TIMES = ("power_capped", "sw_thermal", "hw_thermal", "power_brake")
Row = dict[str, Any]
Values = Mapping[str, Any]


def utilization_row(key: str, facts: Values, values: Values, counters: Counters, at_ns: int) -> Row:
    """Returns a row of gpu.utilization, without node, ts and processes. ``at_ns`` is CLOCK_MONOTONIC."""
    row: Row = {name: facts.get(name) for name in ("device_id", "uuid", "mig", "name", "memory_model", "chip")}
    row |= {name: values.get(name) for name in _SAME}
    for name in _TIMES:
        row[f"{name}_ns"] = _whole(counters.more((key, name), values.get(f"{name}_total_ns"), at_ns))
    row |= _traffic(key, values, counters, at_ns)
    total, used = values.get("total_bytes"), values.get("used_bytes")
    energy, action = values.get("energy_mj"), values.get("recovery_action")
    row |= {
        "mem_used_pct": 100 * used / total if total and used is not None else None,
        "driver_mem_bytes": values.get("reserved_bytes"),
        "wall_ns": _whole(counters.more((key, "wall"), at_ns, at_ns)),
        "mem_bandwidth_util_pct": values.get("dram_active_pct"),
        "energy_j": None if energy is None else energy / 1000,
        "clock_event_reasons": reasons_text(values.get("clock_events")),
        "recovery_action": None if action is None else RECOVERY.get(int(action), str(int(action))),
        "pcie_errors": _sum(values.get("pcie_non_fatal"), values.get("pcie_fatal")),
        **{name: None if values.get(name) is None else bool(values[name]) for name in _FLAGS},
    }
    return row


def _traffic(key: str, values: Values, counters: Counters, at_ns: int) -> Row:
    """Bytes a second: from the counters where the device has them, else from GPM, else from the driver's own sample."""
    row: Row = {}
    for way in ("rx", "tx"):
        pcie = counters.per_second((key, "pcie", way), values.get(f"pcie_{way}_bytes"), at_ns)
        if values.get(f"pcie_{way}_bytes") is None:
            pcie = _times(values.get(f"pcie_{way}_mib_per_s"), MIB)
            pcie = _times(values.get(f"pcie_{way}_kb_per_s"), KB) if pcie is None else pcie
        row[f"pcie_{way}_bytes_per_s"] = pcie
        nvlink = counters.per_second((key, "nvlink", way), values.get(f"nvlink_{way}_kib"), at_ns)
        if values.get(f"nvlink_{way}_kib") is None:
            nvlink = values.get(f"nvlink_{way}_mib_per_s")
            row[f"nvlink_{way}_bytes_per_s"] = _times(nvlink, MIB)
        else:
            row[f"nvlink_{way}_bytes_per_s"] = _times(nvlink, KIB)
    return row


_LINK = (
    "kind",
    "link",
    "peer",
    "peer_kind",
    "peer_id",
    "path",
    "p2p",
    "numa_node",
    "state",
    "width",
    "width_max",
    "generation",
    "generation_max",
    "speed_bytes_per_s",
    "speed_max_bytes_per_s",
    "replays",
    "recoveries",
    "crc_errors",
    "fatal_errors",
)


def link_row(link: Values, facts: Values, values: Values, counters: Counters, at_ns: int) -> Row:
    """Returns a row of gpu.links, without node and ts; ``values`` are those of its GPU."""
    row: Row = {name: link.get(name) for name in _LINK} | {name: facts.get(name) for name in ("device_id", "uuid")}
    key = (link.get("device"), link.get("kind"), link.get("link"))
    if link.get("kind") == "nvlink":
        for way in ("rx", "tx"):
            rate = counters.per_second((key, way), link.get(f"{way}_kib"), at_ns)
            row[f"{way}_bytes_per_s"] = _times(rate, KIB)
    elif link.get("kind") == "pcie":
        row["state"] = _pcie_state(link, values)
        for way in ("rx", "tx"):
            row[f"{way}_bytes_per_s"] = counters.per_second((key, way), values.get(f"pcie_{way}_bytes"), at_ns)
    return row


def _pcie_state(link: Values, values: Values) -> str | None:
    width, most, speed, best = (link.get(name) for name in ("width", "width_max", "generation", "generation_max"))
    if not width or not most:
        return None
    busy = (values.get("gpu_util_pct") or 0) >= BUSY_PCT
    slow = busy and speed and best and speed < best
    return "degraded" if width < most or slow else "full"


def _times(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _sum(*values: float | None) -> int | None:
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


class Counters:
    """Keeps the last value of each counter. A counter that went back (wrapped, or began anew) has no difference."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}

    def more(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns by how much a counter grew since the call before; None at the first one. Never negative."""
        return self._step(key, value, at_ns)[0]

    def per_second(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns the growth a second; ``at_ns`` is on a clock that does not step."""
        grown, length_ns = self._step(key, value, at_ns)
        return None if grown is None or length_ns <= 0 else grown * 1e9 / length_ns

    def forget(self) -> None:
        """The next values are first ones: the driver may have begun its counters anew."""
        self._last.clear()

    def _step(self, key: Hashable, value: float | None, at_ns: int) -> tuple[float | None, int]:
        if value is None:
            self._last.pop(key, None)
            return None, 0
        before, self._last[key] = self._last.get(key), (value, at_ns)
        if before is None or value < before[0]:
            return None, 0
        return value - before[0], at_ns - before[1]
