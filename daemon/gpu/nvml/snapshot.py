"""Assembles the answer to one poll: devices, values, processes, links and events."""

from __future__ import annotations

import ctypes
import time
from itertools import islice
from pathlib import Path

from probing.daemon.gpu.nvml.calls import Calls, DeviceLost, DriverFailed, Values, process_list, process_samples
from probing.daemon.gpu.nvml.devices import Device, facts_of, find_devices
from probing.daemon.gpu.nvml.events import EventThread
from probing.daemon.gpu.nvml.readings import Readings
from probing.daemon.gpu.nvml.topology import Topology

__all__ = ("BACKEND", "Snapshots")

MAX_PROCESSES = 1_024
# The lists of processes: kind -> the function that libnvidia-ml exports.
_LISTS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses_v3",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}
_READ = {kind: process_list(name) for kind, name in _LISTS.items()}
_UNKNOWN = (1 << 64) - 1
# A sample counts as wrong if its time is ahead of this process's clock by more than this, us.
_AHEAD_US = 1_000_000
_SHARES = ("sm_pct", "mem_pct", "encoder_pct", "decoder_pct")

# The value of the columns ``backend`` for GPUs of NVML, as Probing names it.
BACKEND = "cuda"


class _ProcessReadings:
    """Reads the processes of devices. Keeps, by device, the time of the last sample of utilization that was read, and
    the lists that were empty.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._seen_us: dict[str, int] = {}
        self._empty: set[tuple[str, str]] = set()

    def read(self, device: Device, *, slow: bool) -> list[Values] | None:
        """Returns an entry for each process: pid, kind, used_bytes and per cents; None if the driver has no list.

        ``slow``: lists of graphics and MPS that were empty are read again, too. Raises DeviceLost, DriverFailed.
        """
        if device.mig_mode:
            # NVML lists the processes of this GPU under its MIG devices.
            return None
        found: dict[int, Values] = {}
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

    def _add_samples(self, gpu: Device, found: dict[int, Values]) -> None:
        # Samples have times of the system clock. After the clock is set back, older samples have times in the future.
        latest = time.time_ns() // 1000 + _AHEAD_US
        since = self._seen_us.get(gpu.key, 0)
        since = since if since <= latest else 0
        samples = self._calls.ask(
            "nvmlDeviceGetProcessUtilization", gpu.handle, since, device=gpu.key, function=process_samples
        )
        for pid, at_us, *shares in sorted(samples or (), key=_time):
            if at_us > latest:
                break
            since = max(since, at_us)
            if (entry := found.get(pid)) is not None:
                entry |= zip(_SHARES, map(_percent, shares), strict=True)
        self._seen_us[gpu.key] = since


def _time(sample: tuple[int, ...]) -> int:
    return sample[1]


def _percent(value: int) -> int | None:
    """Returns a percentage; None for a number above 100: drivers return such numbers if they have no sample."""
    return value if value <= 100 else None


class Snapshots:
    """Answers polls, for one thread. ``library``: the path of libnvidia-ml.so.1; empty: the loader finds it."""

    def __init__(self, calls: Calls, waits: Calls, library: str, sysfs: Path) -> None:
        self._calls, self._waits = calls, waits
        self._library, self._sysfs = library, sysfs
        self._devices: list[Device] | None = None
        self._events: EventThread | None = None
        self._lost: dict[int, str] = {}
        self._driver: Values = {}

    def poll(self, *, slow: bool, links: bool, pairs: bool) -> Values:
        """Returns the answer as JSON values. Raises DriverFailed.

        ``slow``: error counters are read as well; ``links``: the links that have counters; ``pairs``: all links.
        ``lost`` in the answer has the reasons of lost GPUs, by number.
        """
        first = self._devices is None
        if self._devices is None:
            self._devices = self._start()
        elif slow:
            self._check(self._devices)
        answer: Values = {"backend": BACKEND, "lost": {}, "values": {}, "processes": {}}
        lost = dict(self._lost)
        for device in self._devices:
            if device.device_id in lost:
                continue
            try:
                answer["values"][device.key] = self._readings.read(device, slow=slow)
                answer["processes"][device.key] = self._processes.read(device, slow=slow)
            except DeviceLost as e:
                lost[device.device_id] = str(e)
                answer["values"].pop(device.key, None)
        answer["lost"] = {str(number): reason for number, reason in lost.items()}
        if first:
            answer |= {"devices": self._facts(lost), "driver": self._driver}
        if links or pairs:
            counted = self._topology.counted()
            answer["links"] = counted + (self._topology.pairs(counted) if pairs else [])
        if self._events:
            answer["events"], answer["events_dropped"] = self._events.take()
        answer["problems"] = self._calls.problems[:8]
        return answer

    def waiting_events(self) -> list[Values]:
        """Returns the events that came since the last answer. Thread-safe."""
        return self._events.take()[0] if self._events else []

    def _start(self) -> list[Device]:
        if self._library:
            # pynvml opens the library by name, and the loader then returns the library that is already loaded.
            try:
                ctypes.CDLL(self._library)
            except OSError as e:
                raise DriverFailed("absent", f"the library cannot be loaded: {e}") from e
        self._calls.need("nvmlInit", starts=True)
        self._driver = {
            "driver_version": self._calls.ask("nvmlSystemGetDriverVersion"),
            "cuda_version": _version(self._calls.ask("nvmlSystemGetCudaDriverVersion_v2")),
        }
        devices, self._lost = find_devices(self._calls, starts=True)
        self._readings, self._processes = Readings(self._calls), _ProcessReadings(self._calls)
        self._topology = Topology(self._calls, devices, self._sysfs)
        self._events = EventThread(self._waits, devices)
        self._events.start()
        self._driver["events"] = self._events.registered
        return devices

    def _check(self, devices: list[Device]) -> None:
        """Raises DriverFailed if NVML lists other devices than at the start: then a new process has to start."""
        found, self._lost = find_devices(self._calls, starts=False)
        gone = {device.device_id for device in devices} & self._lost.keys()
        before = {(d.key, d.uuid, d.mig_mode) for d in devices if d.device_id not in gone}
        if before != {(d.key, d.uuid, d.mig_mode) for d in found}:
            raise DriverFailed("changed", "the list of GPUs and MIG devices has changed")

    def _facts(self, lost: dict[int, str]) -> list[Values]:
        rows = []
        for device in self._devices or ():
            place = {"device": device.key, "device_id": device.device_id, "mig": device.mig, "uuid": device.uuid}
            try:
                rows.append(place | facts_of(self._calls, device))
            except DeviceLost as e:
                lost[device.device_id] = str(e)
                rows.append(place | {"bus_id": device.bus_id})
        return rows


def _version(number: int | None) -> str | None:
    """Returns the text of a version number of cuda.h: 12.4 for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
