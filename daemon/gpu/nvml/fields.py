"""Reads field values of NVML: many counters with one call. Numbers and units: NVML_FI_DEV_* of nvml.h."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pynvml

from probing.daemon.gpu.nvml.calls import Calls, layout
from probing.daemon.gpu.nvml.devices import Device

__all__ = ("ALL_LINKS", "FAST", "SLOW", "read_fields")

# The scope of an NVLink counter that stands for the sum over all links.
ALL_LINKS = 0xFFFFFFFF
_Field = int | tuple[int, int]
# Fields that each poll reads. The counters of PCIe and NVLink count bytes and KiB since the driver was loaded.
FAST: Mapping[str, _Field] = {
    "mem_temperature_c": 82,
    "energy_mj": 83,
    "power_capped_total_ns": 74,
    "sw_thermal_total_ns": 269,
    "hw_thermal_total_ns": 270,
    "power_brake_total_ns": 271,
    "pcie_tx_bytes": 197,
    "pcie_rx_bytes": 198,
    "nvlink_tx_kib": (138, ALL_LINKS),
    "nvlink_rx_kib": (139, ALL_LINKS),
}
# Fields that slow polls read: counters of errors.
SLOW: Mapping[str, _Field] = {
    "ecc_corrected": 3,
    "ecc_uncorrected": 4,
    "ecc_corrected_total": 5,
    "ecc_uncorrected_total": 6,
    "retired_pages_sbe": 29,
    "retired_pages_dbe": 30,
    "retirement_pending": 31,
    "pcie_replays": 94,
    "remapped_corrected": 142,
    "remapped_uncorrected": 143,
    "remap_pending": 144,
    "remap_failed": 145,
    "pcie_non_fatal": 179,
    "pcie_fatal": 180,
    "recovery_action": 230,
}
_VALUE = layout(pynvml.c_nvmlFieldValue_t, "valueType", "nvmlReturn", "value")
# The formats of the union nvmlValue_t by nvmlValueType_t: double, unsigned int, unsigned long, unsigned long long,
# signed long long, signed int, unsigned short.
_MEMBERS = tuple(struct.Struct(f"={code}{8 - struct.calcsize('=' + code)}x") for code in "dIQQqiH")
_UNSIGNED = (2, 3)
_MOST = 1 << 62


def read_fields(
    calls: Calls, device: Device, wanted: Mapping[str, _Field], refused: set[tuple[str, str]]
) -> dict[str, float | int]:
    """Returns the values that the device supports, by name. Raises DeviceLost, DriverFailed.

    ``refused`` collects the fields that the device does not support, which are not requested again.
    """
    names = [name for name in wanted if (device.key, name) not in refused]
    if not names:
        return {}
    ids = tuple(wanted[name] for name in names)
    raw = calls.ask("nvmlDeviceGetFieldValues", device.handle, ids, device=device.key, function=_field_values)
    found: dict[str, float | int] = {}
    for name, (kind, code, value) in zip(names, _VALUE.iter_unpack(raw or b""), strict=False):
        if code == 0:
            number = _number(kind, value)
            if number is not None:
                found[name] = number
        elif code in (2, 3, 13):
            refused.add((device.key, name))
    return found


def _field_values(handle: Any, ids: tuple[_Field, ...]) -> bytes:
    asked = _asked(ids)
    if code := pynvml.nvmlLib.nvmlDeviceGetFieldValues(handle, len(ids), asked):
        raise pynvml.NVMLError(code)
    return ctypes.string_at(asked, ctypes.sizeof(asked))


@lru_cache(maxsize=64)
def _asked(ids: tuple[_Field, ...]) -> Any:
    """Returns an array with the ids of the fields, into which NVML writes their values."""
    made = (pynvml.c_nvmlFieldValue_t * len(ids))()
    for entry, field in zip(made, ids, strict=True):
        entry.fieldId, entry.scopeId = field if isinstance(field, tuple) else (field, 0)
    return made


def _number(kind: int, value: int) -> float | int | None:
    number: float | int = value
    if kind not in _UNSIGNED:
        if kind >= len(_MEMBERS):
            return None
        (number,) = _MEMBERS[kind].unpack(value.to_bytes(8, sys.byteorder))
    # NVML_VALUE_NOT_AVAILABLE is all ones.
    return number if 0 <= number < _MOST else None
