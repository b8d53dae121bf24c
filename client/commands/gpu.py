"""``gpu``: shows what each GPU does now, and which processes use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probing.api.text import bandwidth, escape, percent, plural, size
from probing.client.gpus.readings import DEVICES, PROCESSES, READINGS, ask, by_device, device_key, fitting
from probing.client.options import Job, Wide
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, terminal_width
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl gpu --all-nodes", "probingctl gpu --job 4711 -f json")
# Throttle reasons that are normal for idle and busy GPUs, so they are not shown as wrong.
_EVERYDAY = frozenset(("gpu_idle", "app_clocks", "sw_power_cap"))


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _part(used: float | None, total: float | None) -> str:
    return size(used, total) if total else "-"


def _rate(value: float | None) -> str:
    return bandwidth(None if value is None else value / 1e9)


_FIELDS = (
    Field("NODE", "node"),
    Field("GPU", "gpu", right=True),
    Field("RANK", "rank", right=True),
    Field("PID", "pid", right=True),
    Field("UTIL", "gpu_util_pct", percent, right=True),
    Field("SM", "sm_active_pct", percent, right=True),
    Field("TENSOR", "tensor_active_pct", percent, right=True),
    Field("MEMORY", "memory", right=True),
    Field("TEMP", "temperature_c", _whole, right=True),
    Field("POWER", "power", right=True),
    Field("CLOCK", "sm_clock_mhz", _whole, right=True),
    Field("JOB", "job", flex=True),
    Field("WHAT IS WRONG", "wrong", flex=True),
)
_WIDE = (
    Field("DRAM", "dram_active_pct", percent, right=True),
    Field("NVLINK IN", "nvlink_rx_bytes_per_s", _rate, right=True),
    Field("NVLINK OUT", "nvlink_tx_bytes_per_s", _rate, right=True),
    Field("PCIE IN", "pcie_rx_bytes_per_s", _rate, right=True),
    Field("PCIE OUT", "pcie_tx_bytes_per_s", _rate, right=True),
    Field("ENERGY J", "energy_j", _whole, right=True),
    Field("NAME", "name"),
)
# Columns that are left out, in this order, if the terminal is too narrow.
_SPARE = ("node", "pid", "sm_clock_mhz", "tensor_active_pct")
_PROCESS = ("job", "run", "rank", "role", "pid", "start_ns", "source", "kind", "used_bytes", "sm_pct", "mem_pct")


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    wide: Wide = False


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        if job is not None:
            require_live(cluster, job)
        found = ask(cluster, {"devices": DEVICES, "readings": READINGS, "processes": PROCESSES})
    objects = _objects(found["devices"], found["readings"], found["processes"], job)
    width = None if options.wide or settings.output is not None else terminal_width()
    fields = (*_FIELDS[:-2], *_WIDE, *_FIELDS[-2:]) if options.wide else _FIELDS
    lines = [line for gpu in objects for line in _lines(gpu)]
    empty = "(no GPU; `probingctl status` says whether the source nvml runs)\n"
    if job is not None:
        empty = f"(no process of job {escape(job)} is known to use a GPU)\n"
    shown = fitting(fields, lines, width, spare=_SPARE)
    text = render(shown, lines, width, bold=width is not None) if lines else empty
    flat = [
        {**{name: gpu[name] for name in gpu if name != "processes"}, **process}
        for gpu in objects
        for process in gpu["processes"] or [dict.fromkeys(_PROCESS)]
    ]
    write_objects(settings, objects, text, flat)


def _objects(devices: Sequence[Row], readings: Sequence[Row], processes: Sequence[Row], job: str | None) -> list[Row]:
    """Returns each device with its last reading and its ``processes``; with ``job`` only devices and processes of that
    job.
    """
    users, last = by_device(processes), {device_key(row): row for row in readings}
    found = []
    for device in sorted(devices, key=device_key):
        key = device_key(device)
        # A GPU that is gone may have the same number as a present GPU.
        there = device["state"] != "gone"
        own = [row for row in users.get(key, ()) if there and (job is None or row["job"] == job)]
        if job is not None and not own:
            continue
        shown = [{name: row[name] for name in _PROCESS} for row in own]
        reading = last.get(key) if there else None
        found.append({**(reading or {}), **device, "wrong": _wrong(device, reading), "processes": shown})
    return found


def _wrong(device: Row, reading: Row | None) -> list[str]:
    """Returns texts that say what is wrong with a device."""
    if device["state"] != "ok":
        return [f"{device['state']}: {device['reason']}"]
    if reading is None:
        return ["no reading"]
    reasons = [name for name in (reading["clock_event_reasons"] or "").split(",") if name and name not in _EVERYDAY]
    wrong = [f"throttled: {', '.join(reasons)}"] if reasons else []
    if reading["recovery_action"] not in (None, "none"):
        wrong.append(f"the driver asks for {reading['recovery_action']}")
    if reading["remap_failed"]:
        wrong.append("a row remap failed")
    elif reading["remap_pending"] or reading["retirement_pending"]:
        wrong.append("a memory repair needs a reset of the GPU")
    if reading["ecc_uncorrected"]:
        wrong.append(f"{plural(reading['ecc_uncorrected'], 'uncorrected memory error')}")
    width, most = device["pcie_width"], device["pcie_width_max"]
    if width and most and width < most:
        wrong.append(f"PCIe has {width} of {most} lanes")
    return wrong


def _lines(gpu: Row) -> list[Row]:
    """Returns a row for each process of a device; one row for a device without processes."""
    own = f"{gpu['device_id']}" if gpu["mig"] is None else f"{gpu['device_id']}.{gpu['mig']}"
    total, limit, power = gpu.get("total_bytes"), gpu.get("power_limit_w"), gpu.get("power_w")
    shared = {
        **gpu,
        "gpu": own,
        "power": "-" if power is None else f"{power:.0f}" + (f"/{limit:.0f} W" if limit else " W"),
        "wrong": "; ".join(gpu["wrong"]) or None,
    }
    lines: list[Row] = []
    for process in gpu["processes"] or [dict.fromkeys(_PROCESS)]:
        used = process["used_bytes"] if process["used_bytes"] is not None else gpu.get("used_bytes")
        lines.append({**shared, **process, "memory": _part(used, total)})
    return lines
