"""No GPU is lost, hot, throttled, or has memory errors that wait for a reset or a repair.

Limits: the driver slows GPUs down from about 85 C on; an uncorrectable ECC error since the driver was loaded, a pending
or failed row remap, and a recovery action want a reset or another board (NVML, nvmlDeviceGetRemappedRows).
"""

from __future__ import annotations

from collections.abc import Iterator

from probing.diagnosis.preflight.facts import Case, Device
from probing.diagnosis.preflight.result import FAIL, PASS, WARN, Result, names, skipped

__all__ = ("check",)

NAME = "gpu_health"
HOT_C, TOO_HOT_C = 80.0, 85.0
_THROTTLED = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
_RESET = "drain the node and reset the GPU"


def check(case: Case) -> Iterator[Result]:
    """Fails for what makes a job die or compute wrongly, and warns for what makes it slow."""
    good = []
    for node in case.nodes:
        if not node.devices:
            continue
        found = [
            Result(NAME, state, f"GPU {device.device_id} of {node.node} {text}", (node.node,), hint)
            for device in node.devices
            for state, text, hint in _of(device)
        ]
        yield from found
        if not found:
            good.append(node.node)
    if good:
        yield Result(NAME, PASS, f"GPUs are cool and without errors on {names(good)}")
    elif not any(node.devices for node in case.nodes) and case.nodes:
        yield skipped(NAME, "no node shows a GPU")


def _of(device: Device) -> Iterator[tuple[str, str, str]]:
    if device.state in ("lost", "gone"):
        yield FAIL, f"is {device.state}: {device.reason or 'no reason is known'}", _RESET
    if device.recovery_action not in (None, "none"):
        yield FAIL, f"wants the recovery action {device.recovery_action}", _RESET
    if device.ecc_uncorrected:
        yield FAIL, f"has {device.ecc_uncorrected} uncorrected memory errors since the driver was loaded", _RESET
    if device.remap_failed:
        yield FAIL, "has a row of memory that could not be remapped", "replace the board"
    elif device.remap_pending or device.retirement_pending:
        yield FAIL, "has memory that waits for a reset to be remapped", _RESET
    if device.temperature_c is not None and device.temperature_c >= HOT_C:
        hint = "look at fans, air flow and neighbours"
        yield FAIL if device.temperature_c >= TOO_HOT_C else WARN, f"has {device.temperature_c:.0f} C", hint
    if reasons := [r for r in (device.clock_event_reasons or "").split(",") if r in _THROTTLED]:
        yield WARN, f"is slowed down: {', '.join(reasons)}", "look at its temperature and power supply"
