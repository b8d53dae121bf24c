"""Lists the GPUs and MIG devices that NVML shows, with the facts that do not change while the driver runs."""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass, field
from typing import Any

import pynvml

from probing.daemon.gpu.nvml.calls import Calls, DeviceLost, Values

__all__ = ("Device", "bus_address", "facts_of", "find_devices", "memory_of")

MAX_GPUS = 64
MAX_MIGS = 16
_SM, _MEMORY = 1, 2
# NVML_GPU_FABRIC_STATE_COMPLETED of nvml.h: the GPU has registered with the fabric.
_REGISTERED = 3
_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}


@dataclass(slots=True)
class Device:
    """A GPU, or a MIG device of a GPU (``mig``: its number on the GPU ``parent``). ``key``: its name in messages."""

    key: str
    handle: Any
    device_id: int
    mig: int | None = None
    parent: Device | None = None
    uuid: str | None = None
    instance: int | None = None
    compute_instance: int | None = None
    mig_mode: bool | None = None
    bus_id: str | None = None
    migs: list[Device] = field(default_factory=list)


def find_devices(calls: Calls, *, starts: bool) -> tuple[list[Device], dict[int, str]]:
    """Returns (devices, reasons). MIG devices follow their GPU. ``reasons``: why a GPU cannot be opened, by its number.
    ``starts``: this process has not opened the GPUs yet. Raises DriverFailed.
    """
    found: list[Device] = []
    lost: dict[int, str] = {}
    for number in range(min(calls.need("nvmlDeviceGetCount", starts=True), MAX_GPUS)):
        try:
            gpu = _gpu(calls, number, starts=starts)
        except DeviceLost as e:
            lost[number] = str(e)
            continue
        if gpu is None:
            lost[number] = "the driver does not let the daemon open this GPU"
        else:
            found += [gpu, *gpu.migs]
    return found, lost


def _gpu(calls: Calls, number: int, *, starts: bool) -> Device | None:
    key = str(number)
    # The first call starts the GPU (nvml.h), which takes seconds if nobody else keeps it running.
    more_s = calls.START_S if starts else 0.0
    handle = calls.ask("nvmlDeviceGetHandleByIndex", number, device=key, more_s=more_s)
    if handle is None:
        return None
    gpu = Device(key, handle, number)
    gpu.uuid = calls.ask("nvmlDeviceGetUUID", handle, device=key)
    gpu.bus_id = bus_address(calls.ask("nvmlDeviceGetPciInfo", handle, device=key))
    mode = calls.ask("nvmlDeviceGetMigMode", handle, device=key)
    gpu.mig_mode = None if mode is None else bool(mode[0])
    if gpu.mig_mode:
        _add_migs(calls, gpu)
    return gpu


def _add_migs(calls: Calls, gpu: Device) -> None:
    most = calls.ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle, device=gpu.key) or 0
    for number in range(min(most, MAX_MIGS)):
        handle = calls.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, number, device=gpu.key)
        if handle is None:
            continue
        mig = Device(f"{gpu.key}.{number}", handle, gpu.device_id, number, gpu)
        mig.uuid = calls.ask("nvmlDeviceGetUUID", handle, device=mig.key)
        mig.instance = calls.ask("nvmlDeviceGetGpuInstanceId", handle, device=mig.key)
        mig.compute_instance = calls.ask("nvmlDeviceGetComputeInstanceId", handle, device=mig.key)
        gpu.migs.append(mig)


def bus_address(pci: Any) -> str | None:
    """Returns the PCI address of ``pci`` (nvmlPciInfo_t, or its text) in the kernel's form, 0000:17:00.0, or None."""
    text = pci if isinstance(pci, str) else getattr(pci, "busId", None)
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    domain, _, rest = (text or "").lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else None


def facts_of(calls: Calls, device: Device) -> Values:
    """Returns the columns of gpu.devices for a device, without node, time, state and driver. Raises DeviceLost."""
    owner, handle, key = device.parent or device, device.handle, device.key
    memory = memory_of(calls, device)
    facts: Values = {
        "uuid": device.uuid,
        "name": _text(calls.ask("nvmlDeviceGetName", handle, device=key)),
        "total_bytes": memory.get("total_bytes"),
        "memory_model": "discrete" if memory.get("total_bytes") else "unified",
        "parent_uuid": device.parent.uuid if device.parent else None,
        "gpu_instance": device.instance,
        "compute_instance": device.compute_instance,
        "bus_id": owner.bus_id,
        "chip": _ARCHITECTURES.get(calls.ask("nvmlDeviceGetArchitecture", owner.handle, device=owner.key)),
    }
    if capability := calls.ask("nvmlDeviceGetCudaComputeCapability", owner.handle, device=owner.key):
        facts["compute_capability"] = "{}.{}".format(*capability)
    if device.parent:
        attributes = calls.ask("nvmlDeviceGetAttributes", handle, device=key)
        return facts | {"sm_count": getattr(attributes, "multiprocessorCount", None)}
    return facts | _board(calls, device)


def _board(calls: Calls, gpu: Device) -> Values:
    def ask(name: str, *args: int) -> Any:
        return calls.ask(name, gpu.handle, *args, device=gpu.key)

    ecc = ask("nvmlDeviceGetEccMode")
    support = ask("nvmlGpmQueryDeviceSupport")
    return {
        "mig_mode": gpu.mig_mode,
        "minor": ask("nvmlDeviceGetMinorNumber"),
        "serial": _text(ask("nvmlDeviceGetSerial")),
        "ecc": None if ecc is None else bool(ecc[0]),
        "max_sm_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", _SM),
        "max_mem_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
        "gpm": bool(support.isSupportedDevice) if support is not None else False,
        **_fabric(calls, gpu),
    }


def _fabric(calls: Calls, gpu: Device) -> Values:
    """Returns the cluster and clique in which NVLink switches connect the GPU; empty without NVLink switches."""
    # Drivers before 545 have only the first version of the structure.
    versions = (
        ("nvmlDeviceGetGpuFabricInfoV", pynvml.c_nvmlGpuFabricInfo_v2_t()),
        ("nvmlDeviceGetGpuFabricInfo", pynvml.c_nvmlGpuFabricInfo_t()),
    )
    for name, info in versions:
        if calls.ask(name, gpu.handle, ctypes.byref(info), device=gpu.key) is None:
            continue
        # The driver writes only one byte of the state.
        if info.state & 0xFF != _REGISTERED or info.status != 0 or not any(info.clusterUuid):
            return {}
        return {"fabric_cluster": str(uuid.UUID(bytes=bytes(info.clusterUuid))), "fabric_clique": int(info.cliqueId)}
    return {}


def memory_of(calls: Calls, device: Device) -> dict[str, int]:
    """Returns total, free, used and reserved bytes. Drivers that count reserved bytes as used do not report them."""
    found = calls.ask("nvmlDeviceGetMemoryInfo", device.handle, pynvml.nvmlMemory_v2, device=device.key)
    made = {} if found is None else {"reserved_bytes": int(found.reserved)}
    if found is None:
        # Drivers before 510 have only version 1 of the function. ``ask`` remembers unsupported functions by name and
        # ``device``, and both versions have the same name. The space after the key gives version 1 an entry of its own.
        found = calls.ask("nvmlDeviceGetMemoryInfo", device.handle, device=f"{device.key} ")
    if found is None:
        return {}
    return {"total_bytes": int(found.total), "free_bytes": int(found.free), "used_bytes": int(found.used), **made}


def _text(value: object) -> str | None:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return str(text)[:256] if text else None
