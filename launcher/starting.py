"""Starts each generation at most once: the state file records the generation before a process is made, and each process
before it runs its command.
"""

from __future__ import annotations

import os
from copy import deepcopy

from probing.launcher.children import Children
from probing.launcher.held import Held
from probing.launcher.logs import open_log
from probing.launcher.processes import Clock, Stat
from probing.launcher.state import Run, State, StateFile

__all__ = ("adopt_unrecorded", "start")


def start(held: Held, state: State, file: StateFile, children: Children, clock: Clock) -> None:
    """Starts the generation of the group's record here. If a log cannot be written, nothing is started and
    ``held.obstacle`` says why; if the state file cannot be written, ``file.problem`` says why.
    """
    held.obstacle = _log_obstacle(held)
    if held.obstacle or held.group is None or held.spec is None:
        return
    history, before = held.history, deepcopy(held.history)
    history.started, history.runs = history.generation, []
    history.ran = history.record if held.spec.save else ""
    if held.group.order and history.generation > held.group.order.generation and history.since:
        # More restarts than the limit need not be remembered: they cannot change whether the limit is reached.
        history.restarts = [*history.restarts, history.since][-held.spec.max_restarts - 1 :]
    if not file.write(state):
        history.started, history.runs, history.ran = before.started, before.runs, before.ran
        history.restarts = before.restarts
        return
    for worker in held.ranks:
        run = _run(held, worker.worker, worker.rank, clock)
        history.runs.append(run)
        children.spawn(run, held.plan(worker, clock.unix_ns(), dict(os.environ)))
    file.write(state)
    for run in history.runs:
        children.release(run, file.problem)


def adopt_unrecorded(held: Held, stat: Stat, rank: int, children: Children, clock: Clock) -> bool:
    """Records a process of the record's generation if it is the first process of its rank and the rank is not recorded;
    returns whether it was recorded.

    Such processes exist if a launcher was killed while it started them, or if its state file was lost.
    """
    history = held.history
    worker = next((worker for worker in held.ranks if worker.rank == rank), None)
    run = held.run_of(worker.worker) if worker else None
    known = run is not None and run.generation == history.generation
    if worker is None or known or stat.session != stat.pid:
        return False
    history.started = history.generation
    run = _run(held, worker.worker, worker.rank, clock)
    run.pid, run.start_ns = stat.pid, stat.start_ns
    history.runs = [*(old for old in history.runs if old.worker != run.worker), run]
    children.adopt(run)
    return True


def _run(held: Held, worker: str, rank: int, clock: Clock) -> Run:
    path = str(held.log_path(rank))
    return Run(worker, rank, held.history.generation, 0, 0, clock.boot_id, clock.unix_ns(), path)


def _log_obstacle(held: Held) -> str:
    for worker in held.ranks:
        path = held.log_path(worker.rank)
        try:
            os.close(open_log(path))
        except OSError as e:
            return f"the log {path} cannot be written: {e.strerror}"
    return ""
