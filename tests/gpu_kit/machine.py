"""Finds out what this machine has, and so which parts can run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpu_kit.scene import JOBS, Libraries, Machine

__all__ = ("examine", "needs", "with_doubles")

# The first import of torch from a cold disk takes tens of seconds.
EXAMINE_S = 70.0


def examine(python: str, seconds: float = EXAMINE_S) -> Machine:
    """Returns what the interpreter ``python`` and the driver have here."""
    facts = _facts(python, seconds)
    libraries = Libraries(facts.pop("libnccl", ""), facts.pop("libcudart", ""), "")
    return Machine(python, libraries, facts, needs(facts, libraries))


def _facts(python: str, seconds: float) -> dict[str, Any]:
    command = [python, str(JOBS / "what_is_here.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, start_new_session=True)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as e:
        why = f"{python} did not tell what it has in {seconds:g} s: {type(e).__name__}"
        return {"no_gpu": why, "no_torch": why, "kernel": os.uname().release}
    return facts


def needs(facts: dict[str, Any], libraries: Libraries) -> dict[str, str]:
    """Returns why each need of a part cannot be met; "" where it can."""
    no_gpu = facts.get("no_gpu", "")
    torch = facts.get("no_torch", "") or no_gpu
    absent = {name: "" if facts.get(name) else f"{name} is not installed" for name in ("cupy", "jax")}
    library = "" if libraries.nccl and libraries.cudart else "no libnccl or no libcudart was found"
    return {
        "gpu": no_gpu,
        "nvml": no_gpu,
        "torch": torch,
        "nccl": no_gpu or library,
        **{name: no_gpu or why for name, why in absent.items()},
    }


def with_doubles(machine: Machine, nccl: Path, cudart: Path, nvml: Path) -> Machine:
    """Returns the machine of a rehearsal: doubles in place of NCCL, the CUDA runtime and NVML, and no GPU."""
    no_gpu = machine.missing.get("gpu") or "a rehearsal uses no GPU"
    missing = dict.fromkeys(("gpu", "torch", "cupy", "jax"), no_gpu) | {"nvml": "", "nccl": ""}
    libraries = Libraries(str(nccl), str(cudart), str(nvml))
    return Machine(machine.python, libraries, machine.facts | {"rehearsal": True}, missing, rehearsal=True)
