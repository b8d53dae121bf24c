"""Lines of a real trainer: collected once somebody switches that on for its job, and shown by probingctl logs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import Daemon
from ports import free_port
from waiting import until

# It imports torch so that it is taken for a trainer, and writes what stdin says to stderr.
JOB = """
import sys
import torch
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    sys.stderr.write(line)
    sys.stderr.flush()
    print(number, flush=True)
"""


class Trainer:
    def __init__(self, run_job: Callable[..., subprocess.Popen[Any]]) -> None:
        port = free_port()
        self.job = f"n1/127.0.0.1:{port}"
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.process = run_job(
            sys.executable,
            "-c",
            JOB,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.hear()

    def hear(self) -> str:
        assert self.process.stdout
        return str(self.process.stdout.readline().strip())

    def write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.hear()


def test_lines_are_collected_for_the_job_that_asks(
    daemon: Daemon, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    one, other = Trainer(run_job), Trainer(run_job)

    def watched() -> str:
        return next(s["detail"] for s in daemon.json("status")["sources"] if s["name"] == "logs")

    def known() -> set[str]:
        return {row["job"] for row in daemon.json("ps") if row["role"] == "trainer"}

    until(lambda: {one.job, other.job} <= known(), what="two trainers")
    one.write("NCCL WARN before anybody asked")
    daemon.ctl("config", "logs.enabled=true", "--job", one.job)
    until(lambda: watched() == "1 processes", what="one to be watched")
    one.write("node:1:2 [0] NCCL WARN socket gone, token=hunter2")
    one.write("nothing of interest")
    other.write("NCCL WARN of another job")
    found = until(lambda: daemon.json("logs", "--job", one.job), what="the line")
    assert [(row["rank"], row["stream"], row["kind"], row["line"]) for row in found] == [
        (0, "stderr", "NCCL WARN", "node:1:2 [0] NCCL WARN socket gone, token=***")
    ]
    assert daemon.json("logs", "--job", other.job) == []
    daemon.ctl("config", "logs.enabled", "--job", one.job, "--reset")
    until(lambda: watched() == "0 processes", what="nobody to be watched")
    one.write("NCCL WARN after that")
    assert daemon.rows("SELECT count(*) AS n FROM process.logs") == [{"n": 1}]


# Rank 1 raises once a file is there: an exception that no pattern names.
RAISES = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
class ShardCorrupt(Exception): ...
def fetch_shard(number):
    raise ShardCorrupt(f"shard {number}: /data/shard-{number}.tar")
dist.init_process_group("gloo")
value = torch.ones(8)
while True:
    dist.all_reduce(value)
    time.sleep(0.05)
    if dist.get_rank() == 1 and Path(sys.argv[1]).exists():
        fetch_shard(17)
"""


def test_the_reason_of_a_death_is_what_was_raised(
    daemon: Daemon, torchrun_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path
) -> None:
    script, told, port = tmp_path / "raises.py", tmp_path / "told", free_port()
    script.write_text(RAISES)
    torchrun_job(script, told, port=port)
    trainers = f"SELECT rank FROM process.processes WHERE role = 'trainer' AND suffix(job, '{port}')"
    until(
        lambda: len(daemon.rows(trainers)) == 2,
        what=lambda: f"two ranks: {daemon.ctl('ps').stdout}\n{daemon.tail()}\n{(tmp_path / 'job.log').read_text()}",
    )
    daemon.ctl("config", "logs.enabled=true", "--job", f"n1/127.0.0.1:{port}")
    until(
        lambda: [s["detail"] for s in daemon.json("status")["sources"] if s["name"] == "logs"] == ["2 processes"],
        what="both to be watched",
    )
    told.touch()

    def reasons() -> list[str]:
        found = daemon.json("logs", "--job", str(port), "--rank", "1")
        return [row["line"] for row in found if "shard 17" in row["line"]]

    assert until(reasons, what="the reason") == ["[rank1]: ShardCorrupt: shard 17: /data/shard-17.tar"]

    def page() -> str:
        done = daemon.ctl("diagnose", "--job", str(port), check=None)
        return done.stdout if done.returncode == 3 else ""

    text = " ".join(until(lambda: "shard 17" in page() and page(), what="the reason in the diagnosis").split())
    assert "exited with code 1 after [rank1]: ShardCorrupt: shard 17: /data/shard-17.tar" in text
    assert f"`probingctl logs --job n1/127.0.0.1:{port} --rank 1`" in text
