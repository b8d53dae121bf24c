"""The common part of jobs with faults: ranks of gloo that step together until their harness asks for the fault.

A job is ``SCRIPT CASE FOLDER`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Its ranks make steps of 50 ms, in
which they mostly sleep. Once FOLDER/go exists, all ranks leave the same step; then the case begins. The rank at fault
writes the time into FOLDER/fault-RANK right before the fault. TIME_OUT_S: the time-out of the group, s.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

__all__ = ("STEP_S", "Job", "main")

STEP_S = 0.05
GRADIENTS = 1013


class Job:
    """This rank of a job. ``folder``: the harness and the ranks exchange files there."""

    def __init__(self, folder: Path, rank: int | None = None, size: int | None = None) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.size = int(os.environ["WORLD_SIZE"]) if size is None else size

    def join(self) -> None:
        seconds = os.environ.get("TIME_OUT_S")
        dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)) if seconds else None)

    def due(self) -> bool:
        """Whether the harness asks for the fault."""
        return (self.folder / "go").exists()

    def begin(self) -> None:
        """Writes the time at which the fault of this rank begins, if it has not yet."""
        note = self.folder / f"fault-{self.rank}"
        if not note.exists():
            draft = note.with_suffix(".draft")
            draft.write_text(f"{time.time_ns()}\n")
            draft.rename(note)

    def step(self, work: Callable[[], object] | None = None) -> bool:
        """Makes one step; returns whether the fault was due on a rank before it."""
        gradients = torch.zeros(GRADIENTS)
        gradients[0] = float(self.due())
        if work is None:
            time.sleep(STEP_S)
        else:
            work()
        dist.all_reduce(gradients)
        return bool(gradients[0] > 0)

    def enter_group(self) -> None:
        """Moves this process into the cgroup whose directory FOLDER/group names."""
        Path((self.folder / "group").read_text(), "cgroup.procs").write_text(str(os.getpid()))

    def train(self, work: Callable[[], object] | None = None) -> None:
        """Steps until the fault is due on all ranks."""
        while not self.step(work):
            pass

    def go_on(self, work: Callable[[], object] | None = None) -> NoReturn:
        """Steps until the job ends."""
        while True:
            self.step(work)


def main(cases: dict[str, Callable[[Job], object]], *unjoined: str) -> None:
    """Runs the case that the command names; the ranks join first, except in the cases ``unjoined``."""
    name = sys.argv[1]
    job = Job(Path(sys.argv[2]))
    if name not in unjoined:
        job.join()
    cases[name](job)
