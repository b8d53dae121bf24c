"""Hangs of two ranks that ``probingctl diagnose`` names: one that sleeps, and one that calls and does not launch."""

from __future__ import annotations

import json
import time
from typing import Any

from gpu_kit.part import Part
from gpu_kit.parts.watched import FIVE, warmed
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("NOT_JOINED", "NOT_LAUNCHED", "named")

# After this the finding is late: the daemon takes 2 s without progress for a stall here.
NAMED_S = 20.0


def named(scene: Scene, job: Job, verdict: str, function: str) -> None:
    """Checks that ``diagnose`` names rank 1 with ``verdict``, and shows the ``function`` that it is in."""
    begun = time.monotonic()

    def found() -> dict[str, Any] | None:
        answer: dict[str, Any] = scene.daemon.json("diagnose", "--job", job.name)
        culprits = [culprit["rank"] for culprit in answer["culprits"]]
        return answer if answer["verdict"] == verdict and culprits == [1] else None

    try:
        answer = until(found, NAMED_S, verdict, poll_s=0.5)
    except TimeoutError:
        answer = scene.daemon.json("diagnose", "--job", job.name)
    scene.checks.equal("verdict", verdict, answer["verdict"])
    scene.checks.equal("ranks that are named", [1], [culprit["rank"] for culprit in answer["culprits"]])
    scene.checks.equal("its pid", [job.pids[1]], [culprit["pid"] for culprit in answer["culprits"]])
    text = json.dumps(answer)
    scene.checks.add("what it does", function in text, function, "named" if function in text else text[:300])
    scene.checks.measured("named after", f"{time.monotonic() - begun:.1f} s")


def _started(scene: Scene) -> Job:
    job = scene.direct_job(size=2).ready()
    job.do("init", 60)
    warmed(scene, job)
    job.do(f"burst {FIVE} 0 0 101", 30)
    return job


def _not_joined(scene: Scene) -> None:
    job = _started(scene)
    job.do("join_all_reduce 43", ranks=[0])
    job.do("sleep_instead", ranks=[1])
    _in_flight(scene, job)
    named(scene, job, "not_joined", "the_rank_that_sleeps")


def _not_launched(scene: Scene) -> None:
    job = _started(scene)
    job.do("join_all_reduce 43", ranks=[0])
    job.do("call_without_launch 43", ranks=[1])
    rows = until(lambda: len(found := _open(scene, job)) == 2 and found, 15, "both calls in flight")
    scene.checks.equal("states in flight", ["launched", "called"], [row["state"] for row in rows])
    named(scene, job, "not_joined", "the_rank_that_does_not_launch")


def _in_flight(scene: Scene, job: Job) -> None:
    rows = until(lambda: _open(scene, job), 15, "an operation in flight")
    said = [(row["pid"], row["op"], row["count"], row["state"]) for row in rows]
    scene.checks.equal("in flight", [(job.pids[0], "all_reduce", 43, "launched")], said)


def _open(scene: Scene, job: Job) -> list[dict[str, Any]]:
    pids = ", ".join(map(str, job.pids))
    columns = "pid, op, count, state, comm_rank"
    return scene.daemon.rows(f"SELECT {columns} FROM comm.inflight WHERE pid IN ({pids}) ORDER BY comm_rank")


NOT_JOINED = Part("hang_sleep", "a hang: one of two ranks sleeps", 60, _not_joined, ("nccl", "daemon"))
NOT_LAUNCHED = Part(
    "hang_no_launch", "a hang: one of two ranks calls and does not launch", 60, _not_launched, ("nccl", "daemon")
)
