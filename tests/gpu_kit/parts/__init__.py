"""The parts, the most important first."""

from __future__ import annotations

from gpu_kit.part import Part
from gpu_kit.parts import abort, cost, cuda, frameworks, gpus, hangs, leak, operations, reads, rights, torch_job

__all__ = ("PARTS",)

PARTS: tuple[Part, ...] = (
    rights.CHECK,
    gpus.VALUES,
    operations.ONE_RANK,
    torch_job.ONE_RANK,
    torch_job.TWO_RANKS,
    operations.TWO_RANKS,
    hangs.NOT_JOINED,
    hangs.NOT_LAUNCHED,
    gpus.PROCESSES,
    cuda.COUNTS,
    cuda.TORCH,
    leak.LEAK,
    abort.ABORT,
    reads.STACKS,
    reads.LAYOUT,
    reads.RAS,
    frameworks.CUPY,
    frameworks.JAX,
    cost.COST,
)
