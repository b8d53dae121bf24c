"""NCCL as CuPy and JAX call it: the operations that the job counts itself."""

from __future__ import annotations

from typing import Any

from gpu_kit import comparisons
from gpu_kit.part import Part
from gpu_kit.parts.watched import SEVEN, TWENTY_THREE, rows_since
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("CUPY", "JAX")

COUNT = 2003
_SEEN_S = 25.0


def _cupy(scene: Scene) -> None:
    job = scene.job("cupy_rank", "--folder", str(scene.place)).ready(40)
    (first,) = job.do("init", 40)
    scene.checks.measured("CuPy and NCCL", f"{first['cupy']}, {first['version']}")
    _compare(scene, job, f"burst {TWENTY_THREE} {COUNT}")


def _jax(scene: Scene) -> None:
    job = scene.job("jax_rank", size=2).ready(60)
    (first, *_) = job.do("init", 60)
    scene.checks.measured("JAX and its devices", f"{first['jax']}, {first['devices']}")
    _compare(scene, job, f"burst {SEVEN} {COUNT}")


def _compare(scene: Scene, job: Job, command: str) -> None:
    # CuPy has its CUDA runtime linked in: the ends of its operations cannot be seen, and rows of them come when the
    # process ends.
    def called() -> bool:
        job.do("warm", 60)
        return all(_known(scene, pid) for pid in job.pids)

    until(called, _SEEN_S, "an operation of each rank", poll_s=0.3)
    answers = job.do(command, 60)
    job.finish()
    for rank, answer in enumerate(answers):
        label = f"rank {rank}: " if job.size > 1 else ""
        calls, pid, begun = answer["calls"], job.pids[rank], answer["begun"]

        def enough(pid: int = pid, begun: int = begun, least: int = len(calls)) -> list[dict[str, Any]]:
            found = rows_since(scene, pid, begun)
            return found if len(found) >= least else []

        try:
            rows = until(enough, 15, "all rows", poll_s=0.3)
        except TimeoutError:
            rows = rows_since(scene, pid, begun)
        wanted = f"{len(calls)} {calls[0]['op']}"
        scene.checks.no_problems(f"{label}calls", wanted, comparisons.operations(calls, rows))
        if rows:
            scene.checks.measured(f"{label}ends", f"{rows[0]['state']}, by {rows[0]['timing_source']}")


def _known(scene: Scene, pid: int) -> bool:
    tables = ("comm.ops", "comm.inflight")
    return any(scene.daemon.rows(f"SELECT pid FROM {table} WHERE pid = {pid} LIMIT 1") for table in tables)


CUPY = Part("cupy", "NCCL as CuPy calls it", 60, _cupy, ("cupy", "daemon"))
JAX = Part("jax", "NCCL as JAX calls it, two processes on one GPU", 75, _jax, ("jax", "daemon"))
