"""NCCL called directly: every operation has one row, with its arguments and an interval that holds its end."""

from __future__ import annotations

from gpu_kit.part import Part
from gpu_kit.parts.watched import FIVE, SEVEN, TWENTY_THREE, burst, rows_since, warmed
from gpu_kit.scene import Scene, until
from gpu_kit.work import Job

__all__ = ("ONE_RANK", "TWO_RANKS")

# Of the smallest operation of a burst; each next one has an element more.
COUNT = 101


def _one_rank(scene: Scene) -> None:
    job = scene.direct_job().ready()
    _burst(scene, job)
    _graph(scene, job)


def _two_ranks(scene: Scene) -> None:
    job = scene.direct_job(size=2).ready()
    _burst(scene, job)


def _burst(scene: Scene, job: Job) -> None:
    answers = job.do("init", 60)
    scene.checks.measured("NCCL", answers[0]["nccl"])
    warmed(scene, job)
    burst(scene, job, f"{TWENTY_THREE} {SEVEN} {FIVE} {COUNT}")
    _communicator(scene, job)


def _communicator(scene: Scene, job: Job) -> None:
    pids = ", ".join(map(str, job.pids))
    sql = f"SELECT DISTINCT pid, comm, size, rank, cuda_device FROM comm.communicators WHERE pid IN ({pids})"
    known = {row["pid"]: row for row in scene.daemon.rows(sql)}
    said = [(known.get(pid) or {}).get("rank") for pid in job.pids]
    scene.checks.equal("rank of each process", list(range(job.size)), said)
    scene.checks.equal("size of the communicator", {job.size}, {row["size"] for row in known.values()})
    scene.checks.equal("communicators with one name", 1, len({row["comm"] for row in known.values()}))


# Operations that are captured are known, and their ends are not: the row says so.
def _graph(scene: Scene, job: Job) -> None:
    (answer,) = job.do(f"graph {FIVE} {SEVEN} 1009")
    wanted = [("all_reduce", 1009, "graph")] * FIVE

    def found() -> list[tuple[str, int, str]]:
        rows = rows_since(scene, job.pid, answer["begun"])
        return [(row["op"], row["count"], row["timing_source"]) for row in rows if row["count"] == 1009]

    until(lambda: len(found()) >= FIVE, 15, f"{FIVE} rows of captured operations")
    scene.checks.equal("operations captured into a graph", wanted, found())


ONE_RANK = Part(
    "direct_one", "NCCL called directly, one rank: calls, ends, a CUDA graph", 60, _one_rank, ("nccl", "daemon")
)
TWO_RANKS = Part("direct_two", "NCCL called directly, two ranks on one GPU", 60, _two_ranks, ("nccl", "daemon"))
