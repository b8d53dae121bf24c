"""Rows of gpu.events: what the driver reported, and what two readings in a row show to have happened."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

__all__ = ("CLOCK_REASONS", "RECOVERY", "Limiter", "changes_of", "driver_event", "link_changes", "reasons_text")

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
    0x2000: ("fatal_poison", "poisoned memory was read, and the GPU cannot go on"),
    0x4000: ("gpu_unavailable", "the GPU is not available"),
    0x8000: ("recovery_action", "the driver asks for another recovery action"),
}
# nvmlClocksEventReason* of nvml.h.
CLOCK_REASONS = {
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
# Reasons that say that something is wrong; a power cap alone is the everyday state of a busy GPU.
_THROTTLES = 0x8 | 0x20 | 0x40 | 0x80
RECOVERY = {
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
    "remapped_uncorrected": ("row_remapped", "{more} rows of memory were remapped after errors that nothing corrected"),
    "retired_pages_sbe": ("page_retired", "{more} pages of memory were retired after single-bit errors"),
    "retired_pages_dbe": ("page_retired", "{more} pages of memory were retired after double-bit errors"),
}
_LINK_ERRORS = ("replays", "recoveries", "crc_errors")
_MOST = (1 << 63) - 1
Row = dict[str, Any]
Values = Mapping[str, Any]


def driver_event(event: Mapping[str, Any]) -> Row:
    """Returns the row of an event as the process reports it, without its device. Raises KeyError, TypeError, ValueError
    for one that makes no sense."""
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
    """Returns the names of clock event reasons, comma separated; bits without a name as hexadecimal numbers."""
    if mask is None:
        return None
    names = [name for bit, name in CLOCK_REASONS.items() if mask & bit]
    rest = mask & ~sum(CLOCK_REASONS)
    return ",".join([*names, *([f"{rest:#x}"] if rest else [])])


def changes_of(before: Values, now: Values) -> Iterator[Row]:
    """Yields what happened to a GPU between two readings without an event of the driver."""
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
        text = RECOVERY.get(int(action), str(action))
        yield {"event": "recovery_action", "value": int(action), "detail": f"the driver asks for: {text}"}


def link_changes(before: Values, now: Values) -> Iterator[Row]:
    """Yields what happened to an NVLink between two readings; rows of ``gpu.nvml.topology``."""
    link = now.get("link")
    if before.get("state") != now.get("state"):
        event = "link_up" if now.get("state") == "up" else "link_down"
        yield {"event": event, "value": link, "detail": f"NVLink {link} is {now.get('state')}"}
    errors = {name: more for name in _LINK_ERRORS if (more := _growth(before, now, name))}
    if errors:
        text = ", ".join(f"{name} +{more}" for name, more in errors.items())
        yield {"event": "nvlink_errors", "value": sum(errors.values()), "detail": f"NVLink {link}: {text}"}


def _growth(before: Values, now: Values, name: str) -> int:
    first, last = before.get(name), now.get(name)
    return int(last - first) if first is not None and last is not None and last > first else 0


class Limiter:
    """Lets ``most`` events of a kind pass in ``seconds``, and counts the others."""

    def __init__(self, most: int = 30, seconds: float = 60.0) -> None:
        self._most, self._seconds = most, seconds
        self._windows: dict[Hashable, tuple[float, int]] = {}
        self._suppressed: dict[Hashable, int] = {}

    def passes(self, key: Hashable, now: float) -> int | None:
        """Returns how many were held back since the last one that passed; None: this one is held back as well."""
        begin, count = self._windows.get(key, (now, 0))
        if now - begin >= self._seconds:
            begin, count = now, 0
        self._windows[key] = begin, count + 1
        if count >= self._most:
            self._suppressed[key] = self._suppressed.get(key, 0) + 1
            return None
        return self._suppressed.pop(key, 0)
