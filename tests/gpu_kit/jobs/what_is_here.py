"""Prints what the machine's own Python has, as JSON: frameworks, the GPU, and the paths of the CUDA libraries."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ("facts",)

# Distribution -> name in the report.
_PACKAGES = {"cupy-cuda13x": "cupy", "cupy-cuda12x": "cupy", "jax": "jax", "triton": "triton"}
_PACKAGES |= {"nvidia-nccl-cu13": "nccl", "nvidia-nccl-cu12": "nccl", "numpy": "numpy", "pyarrow": "pyarrow"}
_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def facts() -> dict[str, Any]:
    """Returns facts by name; those that could not be found are left out."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": os.uname().release}
    for package, name in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, **_gpu(), **_torch(), **_libraries()}


def _gpu() -> dict[str, Any]:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return {"no_gpu": f"nvidia-smi: {e.strerror if isinstance(e, OSError) else 'no answer in 20 s'}"}
    lines = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    if done.returncode or not lines:
        return {"no_gpu": f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}"}
    return {"gpu_name": lines[0][0], "driver": lines[0][1], "gpus": len(lines)}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as e:
        return {"no_torch": f"torch: {e}"}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return {**found, "no_torch": "torch finds no GPU"}
    return {**found, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _libraries() -> dict[str, Any]:
    """Returns the paths of the libraries that torch's dependencies brought, else of those of the system."""
    roots = [Path(path) for path in {sysconfig.get_path("platlib"), *sys.path} if path]
    patterns = {
        "libcudart": ("nvidia/*/lib/libcudart.so.1[0-9]", "nvidia/*/lib/libcudart.so.[0-9]*"),
        "libnccl": ("nvidia/nccl/lib/libnccl.so.2", "nvidia/*/lib/libnccl.so.2"),
    }
    found: dict[str, Any] = {}
    for name, choices in patterns.items():
        paths = [path for root in roots for pattern in choices for path in sorted(root.glob(pattern))]
        system = sorted(Path("/usr").glob(f"l*/**/{name}.so.[0-9]*")) if not paths else []
        if paths or system:
            found[name] = str([*paths, *system][0])
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
