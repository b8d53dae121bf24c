"""ProcessGroupNCCL: rows beside PyTorch's flight recorder and CUDA events, and a hang of two ranks."""

from __future__ import annotations

from gpu_kit import comparisons
from gpu_kit.part import Part
from gpu_kit.parts.hangs import named
from gpu_kit.parts.watched import FIVE, SEVEN, TWENTY_THREE, burst, rows_since, warmed
from gpu_kit.scene import Scene
from gpu_kit.work import Answer, Job

__all__ = ("ONE_RANK", "TWO_RANKS")

COUNT = 1009
# torch from a cold disk, and a context.
START_S = 40.0


def _one_rank(scene: Scene) -> None:
    job = _started(scene, 1)
    _with_recorder(scene, job, burst(scene, job, f"{TWENTY_THREE} {SEVEN} 0 {COUNT}"))


def _two_ranks(scene: Scene) -> None:
    job = _started(scene, 2)
    _with_recorder(scene, job, burst(scene, job, f"{TWENTY_THREE} {SEVEN} {FIVE} {COUNT}"))
    job.do("join_all_reduce 43", ranks=[0])
    job.do("sleep_instead", ranks=[1])
    named(scene, job, "not_joined", "the_rank_that_sleeps")


def _started(scene: Scene, size: int) -> Job:
    job = scene.job("torch_rank", size=size).ready(START_S)
    (first, *_) = job.do("init", START_S)
    scene.checks.measured("torch and NCCL", f"{first['torch']}, {'.'.join(map(str, first['nccl']))}")
    warmed(scene, job)
    return job


def _with_recorder(scene: Scene, job: Job, answers: list[Answer]) -> None:
    for rank, recorded in enumerate(job.do("trace")):
        begun = answers[rank]["begun"]
        rows = rows_since(scene, job.pids[rank], begun)
        problems = comparisons.recorded_operations(recorded["entries"], begun, rows)
        label = f"rank {rank}: " if job.size > 1 else ""
        scene.checks.no_problems(f"{label}flight recorder", "the same operations", problems)


ONE_RANK = Part(
    "torch_one", "ProcessGroupNCCL, one rank: flight recorder and CUDA events", 75, _one_rank, ("torch", "daemon")
)
TWO_RANKS = Part(
    "torch_two",
    "ProcessGroupNCCL, two ranks on one GPU: flight recorder, CUDA events, a hang",
    75,
    _two_ranks,
    ("torch", "daemon"),
)
