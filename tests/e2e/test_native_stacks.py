"""A rank that waits in gloo is found by the C++ function it waits in, and is not stopped for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import Daemon
from ports import free_port
from waiting import until

Launch = Callable[..., Any]
JOB = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
open(sys.argv[1], "w").close()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(23))
time.sleep(9999)
"""


def test_a_hung_rank_is_found_in_sql(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "hangs.py"
    script.write_text(JOB)
    flags = [tmp_path / f"flag{rank}" for rank in range(2)]
    ranks = []
    for rank, flag in enumerate(flags):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(run_job(sys.executable, script, flag, env=env))
    until(lambda: all(flag.exists() for flag in flags), what="the ranks to have met")
    job = f"n1/127.0.0.1:{port}"
    until(lambda: len([r for r in daemon.json("ps") if r["job"] == job]) == 2, what="the ranks to be known")
    sql = f"SELECT DISTINCT rank, frame_type FROM python.backtrace WHERE job = '{job}' AND func LIKE '%allreduce%'"
    found = until(lambda: daemon.rows(sql), what="a native frame of the collective")
    assert found == [{"rank": 0, "frame_type": "Native"}]
    # The thread that called it waits in C++ inside its Python: one stack, the script's frames outside.
    caller = until(lambda: waiting(daemon, ranks[0].pid), what="the calling thread to wait")
    kinds = [f["frame_type"] for f in caller["frames"]]
    first_python = kinds.index("Python")
    assert any("c10d::" in f["func"] for f in caller["frames"][:first_python])
    assert "all_reduce" in [f["func"] for f in caller["frames"] if f["frame_type"] == "Python"]
    assert kinds[-1] == "Native"
    assert "TracerPid:\t0" in Path(f"/proc/{ranks[0].pid}/status").read_text()


def waiting(daemon: Daemon, pid: int) -> dict[str, Any] | None:
    """The thread that is in Python and in c10d at once, when it is blocked where that can be read."""
    threads: list[dict[str, Any]] = daemon.json("stacks", "--native", str(pid))
    for thread in threads:
        in_python = any(f["frame_type"] == "Python" for f in thread["frames"])
        if in_python and any("c10d::" in f["func"] for f in thread["frames"]):
            return thread
    return None
