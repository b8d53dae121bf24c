"""GPM (GPU performance monitoring): activity between two samples, on Hopper and newer. Units: nvmlGpmMetricId_t."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import pynvml

from probing.daemon.gpu.nvml.arrays import layout
from probing.daemon.gpu.nvml.calls import Calls
from probing.daemon.gpu.nvml.devices import Device

__all__ = ("METRICS", "Gpm")

# Per cent, but for the last four: MiB a second.
METRICS = {
    "graphics_active_pct": 1,
    "sm_active_pct": 2,
    "sm_occupancy_pct": 3,
    "tensor_active_pct": 5,
    "dram_active_pct": 10,
    "fp64_active_pct": 11,
    "fp32_active_pct": 12,
    "fp16_active_pct": 13,
    "pcie_tx_mib_per_s": 20,
    "pcie_rx_mib_per_s": 21,
    "nvlink_rx_mib_per_s": 60,
    "nvlink_tx_mib_per_s": 61,
}
_NAMES = tuple(METRICS)
_METRIC = layout(pynvml.c_nvmlGpmMetric_t, "nvmlReturn", "value")


class _Pair:
    """Two samples of one device, which take turns, and the structure that compares them."""

    def __init__(self, calls: Calls) -> None:
        self.samples = [calls.need("nvmlGpmSampleAlloc"), calls.need("nvmlGpmSampleAlloc")]
        self.taken = 0
        self.get = pynvml.c_nvmlGpmMetricsGet_t()
        self.get.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self.get.numMetrics = len(METRICS)
        for at, number in enumerate(METRICS.values()):
            self.get.metrics[at].metricId = number


class Gpm:
    """Keeps the last sample of each device."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pairs: dict[str, _Pair] = {}
        self._without: set[str] = set()

    def read(self, device: Device) -> dict[str, float]:
        """Returns METRICS since the call before for this device; empty at the first one, and where there is no GPM.

        Raises DeviceLost, DriverFailed.
        """
        if device.key in self._without or (device.parent and device.instance is None):
            return {}
        try:
            return self._metrics(device)
        except pynvml.NVMLError:
            # Not on this GPU, this driver, or for this user.
            self._without.add(device.key)
            return {}

    def keep(self, devices: Iterable[Device]) -> None:
        """Drops what belongs to devices that are not there any more, and asks again those that had no GPM."""
        known = {device.key for device in devices}
        for key in [key for key in self._pairs if key not in known]:
            for sample in self._pairs.pop(key).samples:
                self._calls.ask("nvmlGpmSampleFree", sample)
        self._without.clear()

    def _metrics(self, device: Device) -> dict[str, float]:
        pair = self._pairs.get(device.key)
        if pair is None:
            support = self._calls.ask("nvmlGpmQueryDeviceSupport", (device.parent or device).handle, device=device.key)
            if support is None or not support.isSupportedDevice:
                self._without.add(device.key)
                return {}
            pair = self._pairs[device.key] = _Pair(self._calls)
        sample = pair.samples[pair.taken % 2]
        if device.parent:
            args: tuple[Any, ...] = (device.parent.handle, device.instance, sample)
            self._calls.need("nvmlGpmMigSampleGet", *args, device=device.key)
        else:
            self._calls.need("nvmlGpmSampleGet", device.handle, sample, device=device.key)
        pair.taken += 1
        if pair.taken < 2:
            return {}
        pair.get.sample1, pair.get.sample2 = pair.samples[pair.taken % 2], sample
        self._calls.need("nvmlGpmMetricsGet", pair.get, device=device.key)
        # pynvml's structures take longer to read their members than NVML takes to write them.
        found = _METRIC.iter_unpack(ctypes.string_at(pair.get.metrics, _METRIC.size * len(_NAMES)))
        # An overflow shows as NaN or a negative number.
        return {
            name: value for name, (code, value) in zip(_NAMES, found, strict=True) if code == 0 and 0 <= value < 1e15
        }
