"""``ncclCommAbort`` of a communicator with an operation open: the operation failed, and the communicator is aborted."""

from __future__ import annotations

from typing import Any

from gpu_kit.part import Part
from gpu_kit.parts.watched import warmed
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("ABORT",)


def _abort(scene: Scene) -> None:
    job = scene.direct_job(size=2).ready()
    job.do("init", 60)
    warmed(scene, job)
    job.do("begin_all_reduce 43", ranks=[0])
    job.do("abort", ranks=[0])
    rows = until(lambda: _closed(scene, job), 15, "the row of the operation that was open")
    scene.checks.equal("state of the operation", ["failed"], [row["state"] for row in rows])
    scene.checks.add("its error", bool(rows[0]["error"]), "a text", rows[0]["error"])
    sql = f"SELECT state FROM comm.communicators WHERE pid = {job.pid} ORDER BY ts DESC LIMIT 1"
    scene.checks.equal("state of the communicator", [{"state": "aborted"}], scene.daemon.rows(sql))


def _closed(scene: Scene, job: Job) -> list[dict[str, Any]]:
    return scene.daemon.rows(f"SELECT state, error FROM comm.ops WHERE pid = {job.pid} AND count = 43")


ABORT = Part("abort", "`ncclCommAbort` with an operation open", 40, _abort, ("nccl", "daemon"))
