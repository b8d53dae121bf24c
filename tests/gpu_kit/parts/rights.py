"""``probingd check``: what this kernel and these rights allow."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from gpu_kit.part import Part
from gpu_kit.patience import patient
from gpu_kit.scene import Scene

__all__ = ("CHECK",)


def _check(scene: Scene) -> None:
    command = [str(Path(scene.bin, "probingd")), "check", "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(20))
    if not done.stdout.strip():
        raise RuntimeError(f"probingd check: {done.stderr.strip()[:500]}")
    for found in json.loads(done.stdout):
        name, detail = f"{found['name']}", f"{found['state']}: {found['detail']}".rstrip(": ")
        if found["needed"]:
            scene.checks.add(name, found["state"] == "ok", "ok", detail)
        else:
            scene.checks.measured(name, detail if found["state"] == "ok" else f"{detail}; costs: {found['cost']}")
    scene.checks.equal("exit status", 0, done.returncode)


CHECK = Part("check", "`probingd check`", 20, _check)
