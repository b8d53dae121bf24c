"""What probes cost a GPU job: blocks with the probes on and paused in turn. Nothing is compared with a limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_kit.figures import durations, ratio, read_times, times_between
from gpu_kit.part import Part
from gpu_kit.parts.watched import warmed
from gpu_kit.scene import Scene
from gpu_kit.work import Job

__all__ = ("COST", "Plan", "pairs")

_SEED = 5


class Plan(NamedTuple):
    """How many pairs of blocks are timed, how long each is, and the time after a switch that is left out."""

    pairs: int
    block_s: float
    margin_s: float

    @property
    def seconds(self) -> float:
        """The time that all blocks take, and a little more for the switches."""
        return self.pairs * 2 * (self.block_s + self.margin_s + 0.1) + 2.0


_PLAN, _REHEARSAL = Plan(20, 0.5, 0.1), Plan(3, 0.3, 0.1)
_LAUNCHES = Plan(6, 0.5, 0.3)
# Beside the operation: 2,000 operations a second with it.
GAP_US = 450


def _cost(scene: Scene) -> None:
    plan = _REHEARSAL if scene.machine.rehearsal else _PLAN
    job = scene.job("torch_rank").ready(40) if scene.has("torch") else scene.direct_job().ready()
    job.do("init", 60)
    warmed(scene, job)
    watch = scene.daemon
    try:
        _measure(scene, job, "small all_reduces", f"pace {{seconds}} {GAP_US} {{file}}", plan, watch.pause, 100)
        if not scene.has("torch"):
            scene.checks.skip("training step", scene.machine.missing["torch"])
            return
        _measure(scene, job, "training step", "train {seconds} {file}", plan, watch.pause, 1)
        watch.pause(False)
        _measure(scene, job, "kernel launch", "launch_rate {seconds} {file}", _LAUNCHES, _launches_off(scene), 1000)
    finally:
        watch.pause(False)
        watch.set("cuda.launches", "false")


def _launches_off(scene: Scene) -> Callable[[bool], None]:
    return lambda off: scene.daemon.set("cuda.launches", "false" if off else "true")


def _measure(
    scene: Scene, job: Job, name: str, command: str, plan: Plan, switch: Callable[[bool], None], batch: int
) -> None:
    file = scene.place / f"{name.replace(' ', '-')}.times"
    job.tell(command.format(seconds=plan.seconds, file=file))
    job.hear(60)
    on, off = pairs(file, plan, switch)
    job.hear(60)
    if not on:
        scene.checks.add(name, False, "blocks with work in them", "none")
        return
    scene.checks.measured(name, f"{sorted(off)[len(off) // 2] / batch * 1e6:.1f} us without, {ratio(on, off)} with")


def pairs(file: Path, plan: Plan, switch: Callable[[bool], None]) -> tuple[list[float], list[float]]:
    """Returns the seconds of a step in blocks with probes and in blocks without; the k-th of both are a pair.

    ``switch(True)`` ends the probes. A block in which the job wrote no two times is left out with its pair.
    """
    chooser = random.Random(_SEED)
    blocks: list[dict[bool, tuple[int, int]]] = []
    for _ in range(plan.pairs):
        pair: dict[bool, tuple[int, int]] = {}
        for paused in sorted((True, False), key=lambda _: chooser.random()):
            switch(paused)
            time.sleep(plan.margin_s)
            begun = time.monotonic_ns()
            time.sleep(plan.block_s)
            pair[paused] = (begun, time.monotonic_ns())
        blocks.append(pair)
    times = read_times(file)
    on: list[float] = []
    off: list[float] = []
    for pair in blocks:
        steps = {paused: durations(times_between(times, *pair[paused])) for paused in pair}
        if all(steps.values()):
            on.append(sum(steps[False]) / len(steps[False]))
            off.append(sum(steps[True]) / len(steps[True]))
    return on, off


COST = Part("cost", "cost: probes on and paused in turn; launches counted or not", 120, _cost, ("nccl", "daemon"))
