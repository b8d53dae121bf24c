"""Steps of real jobs under a real daemon: `train.steps` equals what each job counted itself, up to a constant."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon
from long import long
from ports import free_port
from waiting import until, whole_lines

Row = dict[str, Any]
# Name -> (script, ranks, environment)
TRAININGS: dict[str, tuple[str, int, dict[str, str]]] = {
    "plain": ("accumulation.py", 2, {"MODE": "plain", "PACE": "0.02"}),
    "no_sync": ("accumulation.py", 2, {"MODE": "no_sync", "PACE": "0.02"}),
    "fused": ("accumulation.py", 2, {"MODE": "reduced", "PACE": "0.02", "OPTIMIZER": "fused"}),
    "foreach": ("accumulation.py", 2, {"MODE": "reduced", "PACE": "0.02", "OPTIMIZER": "foreach"}),
    "named": ("accumulation.py", 2, {"MODE": "plain", "PACE": "0.3"}),
    "single": ("optimizers.py", 1, {"KIND": "fused"}),
    "aperiodic": ("aperiodic.py", 2, {}),
}
# A pair of clocks is asked one after the other.
CLOCK_NS = 1_000_000
AT_ONCE = {"named": 2, "aperiodic": 100}


class Training:
    def __init__(self, start: Callable[..., subprocess.Popen[Any]], folder: Path, name: str) -> None:
        script, size, options = TRAININGS[name]
        port = free_port()
        self.job = f"n1/127.0.0.1:{port}"
        self.count = AT_ONCE.get(name, 10)
        self.lists = [folder / f"{name}.{rank}" for rank in range(size)]
        self.ranks = []
        for rank, path in enumerate(self.lists):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **options}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.ranks.append(start(sys.executable, JOBS / script, path, env=env, **pipes))

    def hear(self, word: str) -> None:
        for rank in self.ranks:
            assert rank.stdout
            assert rank.stdout.readline().strip() == word

    def tell(self) -> None:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(f"steps {self.count}\n")
            rank.stdin.flush()

    def begun(self, rank: int) -> list[int]:
        """When each step began, UTC ns."""
        offset = time.time_ns() - time.monotonic_ns()
        return [json.loads(line)["before_ns"] + offset for line in whole_lines(self.lists[rank])]

    def own(self, rank: int, rows: list[Row]) -> list[int]:
        """The job's number of the step in which each row begins; or ends, where that is the end of an optimizer."""
        begun = self.begun(rank)
        times = [row["t"] + (0 if row["ops"] else row["duration_ns"]) for row in rows]
        return [bisect(begun, t) - 1 for t in times]


class Trainings:
    """All jobs at once, under one daemon."""

    def __init__(self, daemon: Daemon, made: dict[str, Training]) -> None:
        self.daemon, self.made = daemon, made

    def steps(self) -> None:
        """Have each job make some more."""
        for training in self.made.values():
            training.tell()
        for training in self.made.values():
            training.hear("done")

    def rows(self, name: str, rank: int) -> list[Row]:
        return self.daemon.rows(
            "SELECT epoch_ns(ts) AS t, duration_ns, step, source, confidence, why, ops, comm_ns FROM train.steps "
            f"WHERE job = '{self.made[name].job}' AND rank = {rank} ORDER BY ts"
        )

    def all_reported(self) -> bool:
        self.steps()
        return all(
            len(self.told(name, rank)) >= 40
            for name, training in self.made.items()
            for rank in range(len(training.ranks))
            if name not in AT_ONCE
        ) and all(len(self.told("named", rank)) >= 8 for rank in (0, 1))

    def told(self, name: str, rank: int) -> list[Row]:
        rows = self.rows(name, rank)
        return [row for row in rows if row["source"] == "variable" and row["ops"]] if name == "named" else rows


@pytest.fixture
def trainings(daemon: Daemon, run_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path) -> Trainings:
    made = {name: Training(run_job, tmp_path, name) for name in TRAININGS}
    for training in made.values():
        training.hear("ready")
    pids = {rank.pid for training in made.values() for rank in training.ranks}
    until(lambda: pids <= {row["pid"] for row in daemon.json("ps") if row["role"] == "trainer"}, what="all trainers")
    daemon.ctl("vars", "--job", made["named"].job, "training.step", "--watch", "--interval", "100ms")
    return Trainings(daemon, made)


@long
def test_steps_equal_those_of_the_jobs(trainings: Trainings) -> None:
    until(trainings.all_reported, what="steps of all jobs")
    for name in TRAININGS.keys() - {"named", "aperiodic"}:
        check(trainings, name)
    for name in ("plain", "no_sync"):
        assert sources(trainings, name) == {"collective_period"}
    for name in ("fused", "foreach"):
        assert sources(trainings, name) == {"optimizer_frame"}
        (row, *_) = trainings.rows(name, 0)
        assert row["why"].startswith("the optimizer runs once in 3 repeats")
        assert 0 < row["comm_ns"] <= row["duration_ns"]
        assert row["ops"] % 3 == 0
    assert sources(trainings, "single") == {"optimizer_frame"}
    assert {row["why"] for row in trainings.rows("single", 0)} == {"the fused optimizer runs once in it (1 call)"}
    assert [trainings.rows("aperiodic", rank) for rank in (0, 1)] == [[], []]
    named = trainings.made["named"]
    for rank in (0, 1):
        rows = trainings.told("named", rank)
        assert [row["step"] for row in rows] == named.own(rank, rows)


def sources(trainings: Trainings, name: str) -> set[str]:
    ranks = range(len(trainings.made[name].ranks))
    return {row["source"] for rank in ranks for row in trainings.rows(name, rank)}


def check(trainings: Trainings, name: str) -> None:
    """Without holes, from the beginning to the last that has ended, and at one offset on all ranks."""
    training = trainings.made[name]
    offsets = set()
    for rank in range(len(training.ranks)):
        rows = trainings.rows(name, rank)
        own = training.own(rank, rows)
        assert own == list(range(own[0], own[0] + len(rows))), name
        assert own[0] <= 4, name
        offsets |= {number - row["step"] for number, row in zip(own, rows, strict=True)}
        for row, following in pairwise(rows):
            assert abs(row["t"] + row["duration_ns"] - following["t"]) < CLOCK_NS, name
        assert min(row["confidence"] for row in rows) >= 0.7, name
    assert len(offsets) == 1, name
