"""A leak of GPU memory, found by the function that allocates and does not free."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from gpu_kit.part import Part, Skip
from gpu_kit.parts.watched import SEEN_S, TWENTY_THREE
from gpu_kit.scene import JOBS, Scene, until
from gpu_kit.work import Job

__all__ = ("LEAK",)

SIZE = 40_961
_COMPILERS = ("cc", "gcc", "clang", "nvcc")
# The functions keep their order and frame pointers.
_FLAGS = {"nvcc": ("-O1", "-Xcompiler", "-fno-omit-frame-pointer,-fno-toplevel-reorder")}
_USUAL_FLAGS = ("-O1", "-fno-omit-frame-pointer", "-fno-toplevel-reorder")


def _leak(scene: Scene) -> None:
    program = _compile(scene.place)
    library = scene.machine.libraries.cudart
    folder = scene.place / "leak-job"
    folder.mkdir(exist_ok=True)
    command = [str(program), library, str(TWENTY_THREE), str(SIZE)]
    with Job(command, folder, 1, {"LD_LIBRARY_PATH": str(Path(library).parent)}) as job:
        (said,) = job.hear()
        if "missing" in said:
            raise Skip(said["missing"])
        _find(scene, job, said)


def _find(scene: Scene, job: Job, said: dict[str, Any]) -> None:
    rounds = 0

    def seen() -> list[dict[str, Any]]:
        nonlocal rounds
        job.do("run")
        rounds += 1
        return _rows(scene, job)

    until(seen, SEEN_S, "an allocation", poll_s=0.5)
    job.do("run")
    rounds += 1

    def settled() -> list[dict[str, Any]]:
        rows = _rows(scene, job)
        leaks = [row for row in rows if _inside(row, said)]
        others = [row for row in rows if row not in leaks]
        whole = leaks and leaks[0]["live"] >= TWENTY_THREE and all(row["live"] == 0 for row in others)
        return rows if whole and len(rows) == 2 else []

    try:
        rows = until(settled, 15, "both functions", poll_s=0.5)
    except TimeoutError:
        rows = _rows(scene, job)
    leaks = [row for row in rows if row["live"]]
    shown = [f"{row['caller']}: {row['live']} live" for row in rows]
    scene.checks.equal("functions with memory that is not freed", 1, len(leaks))
    scene.checks.add(
        "the function",
        bool(leaks) and _inside(leaks[0], said),
        f"the leaking one, at 0x{said['begin']:x} to 0x{said['end']:x}",
        shown,
    )
    live = leaks[0]["live"] if leaks else 0
    # Rounds before the probes were there were not seen.
    scene.checks.one_of("allocations that live", [TWENTY_THREE * number for number in range(1, rounds + 1)], live)
    scene.checks.equal("their bytes", live * SIZE, leaks[0]["live_bytes"] if leaks else 0)


def _rows(scene: Scene, job: Job) -> list[dict[str, Any]]:
    lasts = "arg_max(live, ts) AS live, arg_max(live_bytes, ts) AS live_bytes"
    where = f"pid = {job.pid} AND kind = 'device' AND size_class = 65536"
    return scene.daemon.rows(
        f"SELECT stack, any_value(caller) AS caller, {lasts} FROM cuda.memory WHERE {where} GROUP BY stack"
    )


def _inside(row: dict[str, Any], said: dict[str, Any]) -> bool:
    found = re.search(r"\+0x([0-9a-f]+)$", row["caller"] or "")
    return bool(found) and said["begin"] <= int(found[1], 16) < said["end"]


def _compile(folder: Path) -> Path:
    compiler = next((name for name in _COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise Skip(f"no C compiler: none of {', '.join(_COMPILERS)}")
    program = folder / "leak"
    flags = _FLAGS.get(compiler, _USUAL_FLAGS)
    done = subprocess.run(
        [compiler, *flags, "-o", str(program), str(JOBS / "leak.c"), "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        raise Skip(f"{compiler} cannot compile the program: {done.stderr.strip()[:300]}")
    return program


LEAK = Part("leak", "a leak of GPU memory, found by its stack", 45, _leak, ("nccl", "daemon"))
