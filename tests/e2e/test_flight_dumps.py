"""Dumps of the flight recorder through the whole daemon, with the rights that it has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Daemon
from long import long_unless
from ports import free_port
from waiting import until

# One rank; it writes its dump where nobody else may read, as ProcessGroupNCCL does, and then waits, or aborts.
JOB = """
import os, signal, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(7))
with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + "0", "wb") as file:
    file.write(_dump_fr_trace())
os.abort() if sys.argv[1] == "abort" else signal.pause()
"""
ROWS = (
    "SELECT job, pid, rank, world_size, profiling_name, input_sizes, top_frame FROM python.torch_nccl_flight_record"
    " WHERE pid = {}"
)


def job_of(run_job: Callable[..., subprocess.Popen[Any]], place: Path, then: str) -> tuple[subprocess.Popen[Any], int]:
    place.mkdir(mode=0o700)
    port = free_port()
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{place}/trace_",
        "TORCH_FR_BUFFER_SIZE": "50",
    }
    return run_job(sys.executable, "-c", JOB, then, env=environment, umask=0o077), port


@pytest.mark.parametrize("then", [long_unless(False, "wait"), "abort"])
def test_the_dump_of_a_job_becomes_rows(
    daemon: Daemon, tmp_path: Path, run_job: Callable[..., subprocess.Popen[Any]], then: str
) -> None:
    job, port = job_of(run_job, tmp_path / then, then)
    rows = until(lambda: daemon.rows(ROWS.format(job.pid)), what=f"the dump of a job that will {then}")
    assert rows == [
        {
            "job": f"n1/127.0.0.1:{port}",
            "pid": job.pid,
            "rank": 0,
            "world_size": 1,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": "[[7]]",
            "top_frame": rows[0]["top_frame"],
        }
    ]
    assert rows[0]["top_frame"].endswith(" all_reduce")
