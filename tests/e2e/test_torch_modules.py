"""Modules of ranks are sampled where a job's setting says so, and become rows with the time that samples stand for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import JOBS, Daemon
from ports import free_port
from waiting import until


def test_modules_are_sampled_where_it_is_set(
    daemon: Daemon, run_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path
) -> None:
    port = free_port()
    job = f"n1/127.0.0.1:{port}"
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_job(sys.executable, JOBS / "modules.py", tmp_path / f"{rank}", env=env)
    for rank in range(2):
        until((tmp_path / f"{rank}").exists, what=f"rank {rank} to stand")
    until(lambda: len(daemon.rows(f"SELECT 1 AS x FROM process.processes WHERE job = '{job}'")) == 2, what="the job")
    daemon.ctl("config", "sampling.torch_modules=true", "--job", job)
    counts = (
        "SELECT rank, model, module, class, stage, sum(samples) > 0 AS innermost, sum(samples_below) > 0 AS below"
        f" FROM python.torch_modules WHERE job = '{job}' GROUP BY ALL"
    )
    until(lambda: len({row["rank"] for row in daemon.rows(counts)}) == 2, what="rows of both ranks")
    assert {tuple(row.values()) for row in daemon.rows(counts)} == {
        (0, "Net", "Net", "Parallel", "forward", False, True),
        (0, "Net", "Net", "Net", "forward", False, True),
        (0, "Net", "layers.3", "Module", "forward", False, True),
        (0, "Net", "layers.3.mlp", "Mlp", "forward", True, True),
        (1, None, None, None, "backward", True, True),
    }
    windows = daemon.rows(
        "SELECT rank, ts, max(window_ns) AS window_ns, max(interval_ns) AS interval_ns, sum(samples) AS samples,"
        f" bool_and(t_end > ts) AS ends FROM python.torch_modules WHERE job = '{job}' GROUP BY rank, ts"
    )
    for window in windows:
        assert window["ends"]
        assert 0 <= window["window_ns"] - window["samples"] * window["interval_ns"] < window["samples"]
    # What is not asked for is not sampled.
    assert daemon.rows(f"SELECT 1 AS x FROM python.torch_modules WHERE job <> '{job}'") == []
