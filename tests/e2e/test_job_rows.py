"""What a job reports of itself, under a real daemon: each row once, also after the collector was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from e2e_support import JOBS, Daemon, is_replaced
from ports import free_port
from waiting import until

RANKS = 2


def test_rows_spans_metrics_and_steps_of_a_job(
    own_daemon: Daemon, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    # Its collector is killed.
    daemon = own_daemon
    port, name = free_port(), f"losses_{os.getpid()}"
    job = f"n1/127.0.0.1:{port}"
    ranks = []
    for rank in range(RANKS):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ranks.append(run_job(sys.executable, JOBS / "reports.py", name, env=env, **pipes))

    def steps(count: int) -> None:
        for rank in ranks:
            rank.stdin.write(f"steps {count}\n")
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout.readline() == "done\n"

    def counts() -> list[tuple[int, ...]]:
        """By rank: rows of the table, begins and ends of spans, losses, steps."""
        found = []
        for rank in range(RANKS):
            where = f"WHERE job = '{job}' AND rank = {rank}"
            sql = (
                f"SELECT (SELECT count(*) FROM python.{name} {where}) AS own,"
                f" (SELECT count(*) FROM python.trace_event {where} AND name = 'forward') AS spans,"
                f" (SELECT count(loss) FROM python.training_metrics {where}) AS losses,"
                f" (SELECT count(*) FROM train.steps {where} AND source = 'span') AS steps"
            )
            found.append(tuple(daemon.rows(sql)[0].values()))
        return found

    def known() -> bool:
        return bool(daemon.rows(f"SELECT 1 FROM probing.table_docs WHERE table_name = '{name}'"))

    steps(23)
    until(known, what=daemon.tail)
    until(lambda: counts() == [(23, 46, 23, 22)] * RANKS, what=lambda: f"{counts()}\n{daemon.tail()}")
    own = daemon.rows(f'SELECT rank, step, loss, "where" FROM python.{name} ORDER BY rank, step')
    assert own == [
        {"rank": rank, "step": step, "loss": 0.5 * rank, "where": f"layer {step % 3}"}
        for rank in range(RANKS)
        for step in range(23)
    ]
    everywhere = daemon.json(
        "query", "--all-nodes", f"SELECT rank, count(*) AS n FROM python.{name} GROUP BY rank ORDER BY 1"
    )
    assert everywhere == [{"rank": 0, "n": 23}, {"rank": 1, "n": 23}]

    (collector,) = daemon.children()["probing.daemon.collector"]
    os.kill(collector, signal.SIGKILL)
    steps(7)
    until(lambda: is_replaced(daemon, collector), what=daemon.tail)
    until(lambda: [row[0] for row in counts()] == [30] * RANKS, what=lambda: f"{counts()}\n{daemon.tail()}")
    for rank in ranks:
        rank.stdin.close()
        assert rank.wait() == 0
    until(lambda: [row[:3] for row in counts()] == [(30, 60, 30)] * RANKS, what=lambda: f"{counts()}\n{daemon.tail()}")
