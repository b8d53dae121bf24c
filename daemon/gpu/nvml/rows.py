"""Makes rows of gpu.utilization, gpu.links and gpu.events from the values of the NVML process, the rates of its
counters, and the differences between two readings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from probing.api.tables.schema import Row

__all__ = (
    "Counters",
    "Limiter",
    "changes_of",
    "driver_event",
    "link_changes",
    "link_row",
    "reasons_text",
    "utilization_row",
)

# nvmlEventType* of nvml.h.
_TYPES = {
    0x1: ("ecc_single_bit", "a single-bit memory error was corrected"),
    0x2: ("ecc_double_bit", "a double-bit memory error could not be corrected"),
    0x4: ("pstate", "the performance state has changed"),
    0x8: ("xid", "Xid {data}"),
    0x10: ("clocks", "the clocks have changed"),
    0x80: ("power_source", "the power source has changed"),
    0x200: ("ecc_storm", "many single-bit memory errors in a short time"),
    0x400: ("page_retired", "a page or row of memory was retired"),
    0x800: ("page_retirement_failed", "a page or row of memory could not be retired"),
    0x1000: ("poison", "poisoned memory was read; the process that read it ends"),
    0x2000: ("fatal_poison", "poisoned memory was read, and the GPU cannot continue"),
    0x4000: ("gpu_unavailable", "the GPU is not available"),
    0x8000: ("recovery_action", "the driver asks for another recovery action"),
}
# nvmlClocksEventReason* of nvml.h.
_CLOCK_REASONS = {
    0x1: "gpu_idle",
    0x2: "app_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display",
}
# Clock event reasons that mean a fault; a power cap alone is normal for a busy GPU.
_THROTTLES = 0x8 | 0x20 | 0x40 | 0x80
_RECOVERY = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
_GROWING = {
    "remapped_corrected": ("row_remapped", "{more} rows of memory were remapped after corrected errors"),
    "remapped_uncorrected": ("row_remapped", "{more} rows of memory were remapped after uncorrectable errors"),
    "retired_pages_sbe": ("page_retired", "{more} pages of memory were retired after single-bit errors"),
    "retired_pages_dbe": ("page_retired", "{more} pages of memory were retired after double-bit errors"),
}
_LINK_ERRORS = ("replays", "recoveries", "crc_errors")
_MOST = (1 << 63) - 1
Values = Mapping[str, Any]


def driver_event(event: Mapping[str, Any]) -> Row:
    """Returns the row of an event that the NVML process reported, without its device. Raises KeyError, TypeError,
    ValueError for a malformed event."""
    kind, data, ts_ns = int(event["type"]), min(int(event["data"]), _MOST), int(event["ts_ns"])
    if kind < 0 or data < 0 or not 0 <= ts_ns <= _MOST:
        raise ValueError("an event out of bounds")
    name, text = _TYPES.get(kind, ("unknown", f"the driver reports an event of type {kind:#x}"))
    instances = event["instances"]
    known = name == "xid" and data < 1 << 31
    return {
        "ts": ts_ns,
        "event": name,
        "xid": data if known else None,
        "value": None if name == "xid" or not data else data,
        "detail": text.format(data="of unknown number" if data == 999 else data),
        "gpu_instance": _instance(instances[0]),
        "compute_instance": _instance(instances[1]),
    }


def _instance(number: object) -> int | None:
    return number if isinstance(number, int) and 0 <= number < 1 << 31 else None


def reasons_text(mask: int | None) -> str | None:
    """Returns the names of clock event reasons, comma separated; bits without a name become one hexadecimal number."""
    if mask is None:
        return None
    names = [name for bit, name in _CLOCK_REASONS.items() if mask & bit]
    rest = mask & ~sum(_CLOCK_REASONS)
    return ",".join([*names, *([f"{rest:#x}"] if rest else [])])


def changes_of(before: Values, now: Values) -> Iterator[Row]:
    """Compares two readings of a GPU, and yields an event for each change that the driver does not report itself."""
    was, mask = (int(values.get("clock_events") or 0) & _THROTTLES for values in (before, now))
    if mask and mask & ~was:
        yield {"event": "throttled", "value": mask, "detail": f"clocks are held down: {reasons_text(mask)}"}
    elif was and not mask:
        yield {"event": "unthrottled", "value": 0, "detail": f"clocks are not held down any more: {reasons_text(was)}"}
    for name, (event, text) in _GROWING.items():
        if more := _growth(before, now, name):
            yield {"event": event, "value": more, "detail": text.format(more=more)}
    if now.get("remap_failed") and before.get("remap_failed") == 0:
        yield {"event": "remap_failed", "detail": "a row of memory could not be remapped: the board must be replaced"}
    action, old = now.get("recovery_action"), before.get("recovery_action")
    if action is not None and old is not None and action != old:
        text = _RECOVERY.get(int(action), str(action))
        yield {"event": "recovery_action", "value": int(action), "detail": f"the driver asks for: {text}"}


def link_changes(before: Values, now: Values) -> Iterator[Row]:
    """Compares two readings of an NVLink (rows of ``gpu.nvml.topology``), and yields an event for each change."""
    link = now.get("link")
    state = now.get("state")
    if None not in (state, before.get("state")) and before.get("state") != state:
        yield {
            "event": "link_up" if state == "up" else "link_down",
            "value": link,
            "detail": f"NVLink {link} is {state}",
        }
    errors = {name: more for name in _LINK_ERRORS if (more := _growth(before, now, name))}
    if errors:
        text = ", ".join(f"{name} +{more}" for name, more in errors.items())
        yield {"event": "nvlink_errors", "value": sum(errors.values()), "detail": f"NVLink {link}: {text}"}


def _growth(before: Values, now: Values, name: str) -> int:
    first, last = before.get(name), now.get(name)
    return int(last - first) if first is not None and last is not None and last > first else 0


class Limiter:
    """A rate limit: lets at most ``most`` events with the same key pass in ``seconds``, and counts the suppressed
    events.
    """

    def __init__(self, most: int = 30, seconds: float = 60.0) -> None:
        self._most, self._seconds = most, seconds
        self._windows: dict[Hashable, tuple[float, int]] = {}
        self._suppressed: dict[Hashable, int] = {}

    def passes(self, key: Hashable, now: float) -> int | None:
        """Returns the number of events that were suppressed since the last passed event; None: this event is
        suppressed, too.
        """
        begin, count = self._windows.get(key, (now, 0))
        if now - begin >= self._seconds:
            begin, count = now, 0
        self._windows[key] = begin, count + 1
        if count >= self._most:
            self._suppressed[key] = self._suppressed.get(key, 0) + 1
            return None
        return self._suppressed.pop(key, 0)

    def forgotten(self, now: float) -> int:
        """Returns the number of suppressed events whose ``seconds`` are over, and which no passed event of the same key
        has reported. Drops them, so only one call counts an event.
        """
        over = [key for key in self._suppressed if now - self._windows[key][0] >= self._seconds]
        return sum(self._suppressed.pop(key) for key in over)


KIB, MIB, KB = 1024, 1 << 20, 1000
# A GPU lowers its PCIe speed while it is idle: a low speed counts as degraded only from this utilization on, per cent.
_BUSY_PCT = 50
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
# Counters of time since the driver was loaded, ns.
_TIMES = ("power_capped", "sw_thermal", "hw_thermal", "power_brake")


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
        "recovery_action": None if action is None else _RECOVERY.get(int(action), str(int(action))),
        "pcie_errors": _sum(values.get("pcie_non_fatal"), values.get("pcie_fatal")),
        **{name: None if values.get(name) is None else bool(values[name]) for name in _FLAGS},
    }
    return row


def _traffic(key: str, values: Values, counters: Counters, at_ns: int) -> Row:
    """Returns the bytes per second over PCIe and NVLink: from the counters if the device has them, else from GPM, else
    (PCIe only) from the driver's sample.
    """
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
    """Returns a row of gpu.links, without node and ts; ``values``: the values of the link's GPU."""
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
    busy = (values.get("gpu_util_pct") or 0) >= _BUSY_PCT
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
    """Keeps the last value of each counter. A counter that decreased (wrapped, or was reset) has no difference."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}

    def more(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns the growth of a counter since the last call; None at the first call, and if the counter decreased."""
        return self._step(key, value, at_ns)[0]

    def per_second(self, key: Hashable, value: float | None, at_ns: int) -> float | None:
        """Returns the growth per second since the last call, or None as ``more`` does. ``at_ns``: CLOCK_MONOTONIC."""
        grown, length_ns = self._step(key, value, at_ns)
        return None if grown is None or length_ns <= 0 else grown * 1e9 / length_ns

    def forget(self) -> None:
        """Drops all values, since the driver may have reset its counters."""
        self._last.clear()

    def _step(self, key: Hashable, value: float | None, at_ns: int) -> tuple[float | None, int]:
        if value is None:
            self._last.pop(key, None)
            return None, 0
        before, self._last[key] = self._last.get(key), (value, at_ns)
        if before is None or value < before[0]:
            return None, 0
        return value - before[0], at_ns - before[1]
