"""A rehearsal without a GPU: the doubles of NCCL, the CUDA runtime and NVML, built here."""

from __future__ import annotations

from pathlib import Path

from gpu_kit.machine import with_doubles
from gpu_kit.scene import Machine

__all__ = ("VERSION", "rehearse")

# Of the double of NCCL.
VERSION = "2.30.7"
GPUS = 8


def rehearse(machine: Machine, folder: Path) -> Machine:
    """Builds the doubles into ``folder``, which every user must be able to enter; returns the machine that has them.

    Raises RuntimeError where the compiler refuses them, OSError without one.
    """
    from doubles.doubles import build
    from doubles.nvml_double import NvmlDouble, build_nvml, recorded

    folder.mkdir(mode=0o755, exist_ok=True)
    built = build(folder, VERSION)
    driver = folder / "nvml"
    driver.mkdir(mode=0o755, exist_ok=True)
    library = build_nvml(driver)
    NvmlDouble(library, recorded(GPUS))
    return with_doubles(machine, built.nccl, built.cudart, library)
