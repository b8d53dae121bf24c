"""Reads which processes use a GPU or MIG device, how much of its memory, and how much of its time."""

from __future__ import annotations

from itertools import islice
from typing import Any

from probing.daemon.gpu.nvml.arrays import process_list, process_samples
from probing.daemon.gpu.nvml.calls import Calls
from probing.daemon.gpu.nvml.devices import Device

__all__ = ("ProcessReadings",)

MAX_PROCESSES = 1_024
# By the name of the function that libnvidia-ml exports.
_LISTS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses_v3",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}
_READ = {kind: process_list(name) for kind, name in _LISTS.items()}
_UNKNOWN = (1 << 64) - 1
_SHARES = ("sm_pct", "mem_pct", "encoder_pct", "decoder_pct")
Entry = dict[str, Any]


class ProcessReadings:
    """Keeps, for each device, up to when samples of utilization were read, and which lists were empty."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seen_us: dict[str, int] = {}
        self._empty: set[tuple[str, str]] = set()

    def read(self, device: Device, *, slow: bool) -> list[Entry] | None:
        """Returns an entry for each process: pid, kind, used_bytes and per cents; None where the driver has no list.

        ``slow``: read also the lists of graphics and MPS that were empty. Raises DeviceLost, DriverFailed.
        """
        if device.mig_mode:
            # The MIG devices have the processes.
            return None
        found: dict[int, Entry] = {}
        known = False
        for kind, call in _LISTS.items():
            place = device.key, kind
            if place in self._empty and not slow:
                known = True
                continue
            listed = self._calls.ask(call, device.handle, device=device.key, function=_READ[kind])
            known |= listed is not None
            entries = list(islice(listed or (), MAX_PROCESSES))
            if listed is not None and not entries and kind != "compute":
                self._empty.add(place)
            else:
                self._empty.discard(place)
            for pid, used in entries:
                entry = found.setdefault(pid, {"pid": pid, "kind": kind, "used_bytes": None})
                if used != _UNKNOWN:
                    entry["used_bytes"] = max(entry["used_bytes"] or 0, used)
        if found and not device.parent:
            self._add_samples(device, found)
        return list(found.values()) if known else None

    def _add_samples(self, gpu: Device, found: dict[int, Entry]) -> None:
        since = self._seen_us.get(gpu.key, 0)
        samples = self._calls.ask(
            "nvmlDeviceGetProcessUtilization", gpu.handle, since, device=gpu.key, function=process_samples
        )
        for pid, at_us, *shares in sorted(samples or (), key=_time):
            since = max(since, at_us)
            if (entry := found.get(pid)) is not None:
                entry |= zip(_SHARES, map(_percent, shares), strict=True)
        self._seen_us[gpu.key] = since


def _time(sample: tuple[int, ...]) -> int:
    return sample[1]


def _percent(value: int) -> int | None:
    """Drivers give numbers far above 100 where they have no sample."""
    return value if value <= 100 else None
