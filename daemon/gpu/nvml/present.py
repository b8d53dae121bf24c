"""Whether there is a driver to ask, by files alone: no process is started on a node without GPUs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ("NO_GPU", "why_absent")

NO_GPU = "no NVIDIA GPU is on this node"
MAX_DEVICES = 4_096
_VENDOR = "0x10de"
# Display controllers: VGA and 3D.
_CLASS = "0x03"


def why_absent(sysfs: Path, dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> str:
    """Returns an empty text where the driver is loaded, else NO_GPU or that the driver of the GPUs is missing."""
    if (dev / "nvidiactl").exists() or (proc / "driver/nvidia/version").exists():
        return ""
    devices = sysfs / "bus/pci/devices"
    try:
        names = sorted(os.listdir(devices))[:MAX_DEVICES]  # noqa: PTH208
    except OSError:
        return NO_GPU
    if any(_is_gpu(devices / name) for name in names):
        return "NVIDIA GPUs are there, but their driver is not loaded"
    return NO_GPU


def _is_gpu(folder: Path) -> bool:
    try:
        return _read(folder / "vendor") == _VENDOR and _read(folder / "class").startswith(_CLASS)
    except OSError:
        return False


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(64).decode("ascii", "replace").strip()
