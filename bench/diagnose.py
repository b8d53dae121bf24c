"""CPU of the diagnosis that runs all the time, beside a job of 8 ranks that advances. Budget: 0.2 % of a core.

The daemon's own diagnosis is off, and this process does it instead of the service: it polls, gathers and runs the rules
many times in a row. So the cost of each call is measured apart from the daemon's other work and from other jobs.
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from running import BenchDaemon, arguments, cpu_ns, family, job
from statistics_of_blocks import table

from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.gate import JobNow, jobs_of
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.diagnose.schedule import Reviews, Schedule
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import GATE, WorkerPool
from probing.daemon.service.collector_client import CollectorClient
from probing.diagnosis.ladder import diagnose

RANKS = 8
STEPPING = """
import sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
begin, step = time.monotonic(), 0
while True:
    for _ in range(3):
        dist.all_reduce(torch.ones(1013))
    step += 1
    if step == 10:
        open(sys.argv[1] + str(dist.get_rank()), "w").close()
    time.sleep(max(0.0, begin + step / 5 - time.monotonic()))
"""
HOUR_S = 3600


class Costs:
    """CPU of the daemon and of this process for a call, ms, by process."""

    def __init__(self, daemon: BenchDaemon) -> None:
        self._daemon = daemon

    def of(self, call: Callable[[], object], times: int) -> dict[str, float]:
        call()
        before = self._spent()
        for _ in range(times):
            call()
        after = self._spent()
        return {name: (after[name] - before.get(name, 0)) / times / 1e6 for name in after}

    def _spent(self) -> dict[str, int]:
        found: dict[str, int] = collections.defaultdict(int)
        assert self._daemon.process is not None
        for pid in family(self._daemon.process.pid):
            argv = arguments(pid)
            module = argv[argv.index("-m") + 1].rpartition(".")[2] if "-m" in argv else "supervisor"
            found[module] += cpu_ns([pid])
        found["in the service"] = time.process_time_ns()
        return found


def reviews_in(seconds: float) -> int:
    """Returns how often a steady job is reviewed in its first ``seconds``."""
    reviews, number = Reviews(0.0, DiagnoseConfig().review_s), 0
    while reviews.next < seconds:
        reviews.reviewed(reviews.next, doubtful=False, found=False)
        number += 1
    return number


def found_job(collector: CollectorClient) -> JobNow:
    return next(one for one in jobs_of(collector.live("comm.progress", 2)) if one.living == RANKS)


def measure(settle_s: float) -> dict[str, dict[str, float]]:
    """Returns the costs of a poll, of a review and of a look at a stall."""
    folder = tempfile.mkdtemp(prefix="probingd-bench-")
    daemon = BenchDaemon()
    daemon.config.write_text(f'instance = "bench-{os.getpid()}"\n[sampling]\nhz = 0\n[diagnose]\nenabled = false\n')
    daemon.start()
    with job("-c", STEPPING, f"{folder}/rank", ranks=RANKS):
        while len(list(Path(folder).glob("rank*"))) < RANKS:
            time.sleep(0.2)
        time.sleep(settle_s)
        runtime = Path(f"{daemon.socket}.d")
        collector = CollectorClient(str(runtime / "control" / "collector.sock"))
        pool = WorkerPool(str(runtime / "sql.sock"))
        gate = WorkerPool(str(runtime / "sql.sock"), GATE)
        engine = Engine(collector, pool, gate)
        gatherer = Gatherer("bench", engine, collector)
        mine = found_job(collector)

        def look(*, deep: bool) -> None:
            for facts in gatherer.facts(mine.job, run=mine.run, deep=deep, timeout=5):
                diagnose(facts)

        schedule = Schedule(mine, time.monotonic(), stall_s=HOUR_S, review_s=HOUR_S, late=False)

        def poll() -> None:
            schedule.update(found_job(collector), time.monotonic())
            schedule.due()

        # The workers have to be warm before the first count.
        look(deep=False)
        costs = Costs(daemon)
        found = {
            "a poll": costs.of(poll, 200),
            "a review": costs.of(lambda: look(deep=False), 15),
            "a look at a stall": costs.of(lambda: look(deep=True), 5),
        }
        for part in (pool, gate, collector, daemon):
            part.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle", type=float, default=60, help="seconds that the job runs before the measurement")
    found = measure(parser.parse_args().settle)
    names = sorted({name for costs in found.values() for name, ms in costs.items() if ms >= 0.05})
    rows = [
        {"CPU, ms": what}
        | {name: f"{costs.get(name, 0.0):.2f}" for name in names}
        | {"all": f"{sum(costs.values()):.2f}"}
        for what, costs in found.items()
    ]
    print(table(rows))
    poll, review = sum(found["a poll"].values()), sum(found["a review"].values())
    number = reviews_in(HOUR_S)
    share = (HOUR_S * poll + number * review) / 1000 / HOUR_S * 100
    print(f"a poll each second and {number} reviews in the first hour of a steady job: {share:.3f} % of a core")


if __name__ == "__main__":
    main()
