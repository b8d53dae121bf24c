"""Reads gauges and counters of a GPU or MIG device, and its activity from GPM (GPU performance monitoring) on Hopper
and newer.

Values have the names of their columns of gpu.utilization, if there is such a column. Units of GPM: nvmlGpmMetricId_t.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import pynvml

from probing.daemon.gpu.nvml.calls import NEVER, Calls, Values, layout
from probing.daemon.gpu.nvml.devices import Device, memory_of
from probing.daemon.gpu.nvml.fields import FAST, SLOW, read_fields

__all__ = ("Readings",)

# Metrics of GPM, in per cent, except for the last four, which are in MiB per second.
_METRICS = {
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
_NAMES = tuple(_METRICS)
# Codes after which sampling of a device ends, because each further sample would fail in the same way. After other
# codes, such as a timeout, samples are taken again.
_REFUSED = NEVER | {pynvml.NVML_ERROR_NO_PERMISSION}
_METRIC = layout(pynvml.c_nvmlGpmMetric_t, "nvmlReturn", "value")


class _Pair:
    """Two samples of a device, which are overwritten in turn, and the structure that compares them."""

    def __init__(self, calls: Calls) -> None:
        self.samples = [calls.need("nvmlGpmSampleAlloc"), calls.need("nvmlGpmSampleAlloc")]
        self.taken = 0
        self.get = pynvml.c_nvmlGpmMetricsGet_t()
        self.get.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self.get.numMetrics = len(_METRICS)
        for at, number in enumerate(_METRICS.values()):
            self.get.metrics[at].metricId = number


class _Gpm:
    """Reads metrics of GPM; keeps the last sample of each device."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pairs: dict[str, _Pair] = {}
        self._without: set[str] = set()

    def read(self, device: Device) -> dict[str, float]:
        """Returns the metrics of ``device`` over the time since the last call; empty at the first call, and for a GPU
        without GPM. Raises DeviceLost, DriverFailed.
        """
        if device.key in self._without or (device.parent and device.instance is None):
            return {}
        try:
            return self._metrics(device)
        except pynvml.NVMLError as e:
            if device.key not in self._pairs or int(e.value) in _REFUSED:
                # This GPU or driver has no GPM, or refuses it to this user.
                self._without.add(device.key)
            return {}

    def keep(self, devices: Iterable[Device]) -> None:
        """Drops the samples of all but ``devices``. Devices without GPM are tried again."""
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
        # Reading pynvml's structures would take longer than NVML's call, so their bytes are decoded.
        found = _METRIC.iter_unpack(ctypes.string_at(pair.get.metrics, _METRIC.size * len(_NAMES)))
        # An overflow shows as NaN or a negative number.
        return {
            name: value for name, (code, value) in zip(_NAMES, found, strict=True) if code == 0 and 0 <= value < 1e15
        }


_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
_PCIE_TX, _PCIE_RX = 0, 1
_SINGLE_BIT_CAUSE, _DOUBLE_BIT_CAUSE = 0, 1
_CORRECTED, _UNCORRECTED, _VOLATILE, _AGGREGATE = 0, 1, 0, 1
_CODERS = {
    "encoder_util_pct": "nvmlDeviceGetEncoderUtilization",
    "decoder_util_pct": "nvmlDeviceGetDecoderUtilization",
}


class Readings:
    """Reads the current values of devices. ``read`` raises DeviceLost or DriverFailed."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._gpm = _Gpm(calls)
        self._refused: set[tuple[str, str]] = set()
        self._slow: dict[str, Values] = {}

    def keep(self, devices: list[Device]) -> None:
        """Keeps only the state of ``devices``, a new list of devices. Unsupported values are tried again."""
        self._gpm.keep(devices)
        self._refused.clear()
        self._slow.clear()

    def read(self, device: Device, *, slow: bool) -> Values:
        """Returns the values of ``device``. ``slow``: values that change rarely are read again, too."""
        values: Values = memory_of(self._calls, device)
        values |= self._gpm.read(device)
        if device.parent:
            return values
        values |= self._gauges(device)
        values |= read_fields(self._calls, device, FAST, self._refused)
        self._traffic(device, values)
        if slow or device.key not in self._slow:
            self._slow[device.key] = self._errors(device)
        return values | self._slow[device.key]

    def _gauges(self, gpu: Device) -> Values:
        ask, handle, key = self._calls.ask, gpu.handle, gpu.key
        # If the GPU is lost, the first call raises DeviceLost.
        power_mw = ask("nvmlDeviceGetPowerUsage", handle, device=key)
        rates = ask("nvmlDeviceGetUtilizationRates", handle, device=key)
        return {
            "power_w": None if power_mw is None else power_mw / 1000,
            "gpu_util_pct": _percent(getattr(rates, "gpu", None)),
            "mem_controller_util_pct": _percent(getattr(rates, "memory", None)),
            "temperature_c": self._temperature(gpu),
            "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK, device=key),
            "mem_clock_mhz": ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK, device=key),
            "clock_events": self._clock_events(gpu),
        }

    def _temperature(self, gpu: Device) -> int | None:
        found = self._calls.ask("nvmlDeviceGetTemperatureV", gpu.handle, _GPU_SENSOR, device=gpu.key)
        if found is None:
            found = self._calls.ask("nvmlDeviceGetTemperature", gpu.handle, _GPU_SENSOR, device=gpu.key)
        return None if found is None else int(found)

    def _clock_events(self, gpu: Device) -> int | None:
        # The function was renamed in driver 535.
        found = self._calls.ask("nvmlDeviceGetCurrentClocksEventReasons", gpu.handle, device=gpu.key)
        if found is None:
            found = self._calls.ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.handle, device=gpu.key)
        return None if found is None else int(found)

    def _traffic(self, gpu: Device, values: Values) -> None:
        """Adds PCIe traffic in KB/s, only if neither the counters nor GPM have it: each of the calls takes 20 ms."""
        if "pcie_rx_bytes" in values or "pcie_rx_mib_per_s" in values:
            return
        for name, counter in (("pcie_tx_kb_per_s", _PCIE_TX), ("pcie_rx_kb_per_s", _PCIE_RX)):
            values[name] = self._calls.ask("nvmlDeviceGetPcieThroughput", gpu.handle, counter, device=gpu.key)

    def _errors(self, gpu: Device) -> Values:
        ask, handle, key = self._calls.ask, gpu.handle, gpu.key
        values: Values = dict(read_fields(self._calls, gpu, SLOW, self._refused))
        limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit", handle, device=key)
        values["power_limit_w"] = None if limit_mw is None else limit_mw / 1000
        pstate = ask("nvmlDeviceGetPerformanceState", handle, device=key)
        values["pstate"] = None if pstate == pynvml.NVML_PSTATE_UNKNOWN else pstate
        for name, call in _CODERS.items():
            coder = ask(call, handle, device=key)
            values[name] = None if coder is None else _percent(coder[0])
        if "ecc_corrected" not in values:
            for name, kind, counter in (
                ("ecc_corrected", _CORRECTED, _VOLATILE),
                ("ecc_uncorrected", _UNCORRECTED, _VOLATILE),
                ("ecc_corrected_total", _CORRECTED, _AGGREGATE),
                ("ecc_uncorrected_total", _UNCORRECTED, _AGGREGATE),
            ):
                values[name] = ask("nvmlDeviceGetTotalEccErrors", handle, kind, counter, device=f"{key} {name}")
        if "remapped_corrected" not in values and (rows := ask("nvmlDeviceGetRemappedRows", handle, device=key)):
            names = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
            values |= dict(zip(names, rows, strict=True))
        if "retired_pages_sbe" not in values:
            for name, cause in (("retired_pages_sbe", _SINGLE_BIT_CAUSE), ("retired_pages_dbe", _DOUBLE_BIT_CAUSE)):
                pages = ask("nvmlDeviceGetRetiredPages", handle, cause, device=key)
                values[name] = None if pages is None else len(pages)
        if "pcie_replays" not in values:
            values["pcie_replays"] = ask("nvmlDeviceGetPcieReplayCounter", handle, device=key)
        return values


def _percent(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= 100 else None
