"""The healthy jobs of the corpus: all at once beside one daemon, which must find nothing."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diagnosis_jobs import Ranks, folder_of_job, join_elastic, start_by_slurm
from e2e_support import Daemon

__all__ = ("HEALTHY", "QUIET", "Healthy", "HealthyJobs", "complaints", "noted")

STEPS = 20
# The time that jobs have for their end.
TO_END_S = 120.0
_COMPLAINTS = "SELECT job, run, verdict, ranks, sentence FROM diagnosis.findings WHERE severity <> 'note' ORDER BY ts"


@dataclass(frozen=True)
class Healthy:
    """``again``: it ends soon and is started again until the time is up; or after ``longest_s``. ``restarts``: starts
    its ranks, the first time and, with True, once more. ``note``: the verdict that `diagnose` notes."""

    name: str
    case: str
    again: bool = False
    restarts: Callable[[Ranks, bool], None] | None = None
    note: str = ""
    longest_s: float = math.inf


def _elastic(ranks: Ranks, again: bool) -> None:
    """Starts a torchrun with two ranks, then another one: both start their ranks anew, together."""
    join_elastic(ranks, "healthy.py", "plain", 1 if again else 2)


HEALTHY = (
    Healthy("a start with compilation", "compiled", again=True),
    Healthy("an evaluation on all ranks", "evaluation"),
    Healthy("long steps", "long_steps"),
    Healthy("a checkpoint on rank 0", "checkpoint"),
    Healthy("a compilation on rank 1", "compiles_alone"),
    Healthy("collections of garbage in turn", "collects_in_turn"),
    Healthy("real data-loader workers", "workers"),
    Healthy("one rank ends after the other", "ends", again=True),
    Healthy("a job", "plain"),
    Healthy("another of the same script", "plain"),
    Healthy("an elastic restart", "plain", again=True, restarts=_elastic),
    Healthy("a requeued job", "plain", again=True, restarts=start_by_slurm),
)
# Jobs that stand still or lose time in each step; `diagnose` notes why.
QUIET = (
    Healthy("an idle server that accepts", "idle_accept", note="idle"),
    Healthy("an idle server of asyncio", "idle_asyncio", note="idle"),
    Healthy("an idle server with a queue", "idle_queue", note="idle"),
    # After five minutes a rank that stays is rightly a warning.
    Healthy("a rank that stays for an upload", "stays", note="rank_lingers", longest_s=200.0),
    Healthy("batches of different lengths", "rotating", note="rotating_straggler"),
)


_TERMINATED = "terminate called without an active exception"


class HealthyJobs:
    """Runs ``jobs`` beside ``daemon``. ``long_s``: the length of their long parts, s; longer than W."""

    def __init__(self, daemon: Daemon, long_s: float, jobs: Sequence[Healthy] = HEALTHY) -> None:
        self._daemon = daemon
        self._jobs = jobs
        self._long_s = long_s
        self._over = False
        self.started: list[tuple[Healthy, Ranks]] = []

    def run(self, seconds: float, before_end: Callable[[], object] = lambda: None) -> None:
        """Runs all jobs for ``seconds``, calls ``before_end``, then lets them end normally."""
        with contextlib.ExitStack() as stack:
            lives = [self._life(healthy, stack) for healthy in self._jobs]
            begun = time.monotonic()
            while lives:
                if not self._over and time.monotonic() > begun + seconds:
                    before_end()
                    self._over = True
                assert time.monotonic() < begun + seconds + TO_END_S, f"{len(lives)} jobs do not end"
                lives = [life for life in lives if next(life, True) is not True]
                time.sleep(0.3)

    def _life(self, healthy: Healthy, stack: contextlib.ExitStack) -> Iterator[None]:
        """Runs one job; yields while it waits for something."""
        while True:
            folder = stack.enter_context(folder_of_job())
            env = {"LONG": str(self._long_s), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
            ranks = Ranks(self._daemon.name, folder, "healthy.py", healthy.case, 2, **env)
            stack.callback(ranks.wait)
            stack.callback(ranks.kill)
            self.started.append((healthy, ranks))
            if healthy.restarts is None:
                ranks.start()
            else:
                healthy.restarts(ranks, False)
                yield from self._steps(healthy, ranks)
                healthy.restarts(ranks, True)
            yield from self._steps(healthy, ranks, runs=1 + (healthy.restarts is not None))
            end = time.monotonic() + healthy.longest_s
            while not (healthy.again or self._over or time.monotonic() > end):
                yield
            ranks.go()
            while any(process.poll() is None for process in ranks.processes):
                yield
            if any(ranks.wait()):
                # torch's threads sometimes outlive their group (pytorch/pytorch#190489): then the job was not healthy.
                assert _TERMINATED in ranks.output(), f"{healthy.name}: {ranks.output()}"
                self.started.remove((healthy, ranks))
            if self._over or not (healthy.again or healthy.longest_s < math.inf):
                return

    def _steps(self, healthy: Healthy, ranks: Ranks, runs: int = 1) -> Iterator[None]:
        """Waits until the daemon has seen steps of ``runs`` runs of the job."""
        wanted = 1 if healthy.case == "long_steps" else 2 * STEPS
        sql = f"SELECT run FROM comm.ops WHERE job = '{ranks.job}' GROUP BY run HAVING count(*) >= {wanted}"
        while len(self._daemon.rows(sql)) < runs:
            alive = any(process.poll() is None for process in ranks.processes)
            assert alive, f"{healthy.name} ended before its steps were seen: {ranks.output()}"
            for _ in range(3):
                yield


def complaints(daemon: Daemon) -> list[dict[str, Any]]:
    """Returns the rows of all findings except notes."""
    return daemon.rows(_COMPLAINTS)


def noted(daemon: Daemon) -> set[tuple[str, str]]:
    """Returns jobs with the verdicts that `diagnose` notes of them now."""
    shown = json.loads(daemon.ctl("-f", "json", "diagnose").stdout)
    findings = [finding for finding in (shown, *shown["others"]) if finding["severity"] == "note"]
    return {(finding["job"], finding["verdict"]) for finding in findings}
