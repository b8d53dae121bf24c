"""The commands of the founding documents, word for word but for the program's name, against a live job of two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import BIN, EXAMPLE, PATIENCE, Daemon, family, free_port, remove, wait_for

# Elements of the example's parameters, all of whose gradients are summed once a step: three layers with their biases.
PARAMETERS = (64 * 128 + 128) + (128 * 128 + 128) + (128 * 8 + 8)
HANGS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(23))
sys.stdin.read()
"""


class Founding:
    """A daemon that also listens on TCP, and the example job under it."""

    def __init__(self, base: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.daemon = Daemon(base, "node1", "--listen", self.address)
        self.log = base / "job.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.master = free_port()

    def start(self) -> None:
        self.daemon.start()
        with self.log.open("wb") as log:
            self.run(
                BIN / "torchrun", "--nproc-per-node", "2", "--master-port", str(self.master), EXAMPLE,
                "--steps", "1000000", "--delay-ms", "20", "--report-every", "1", log=log,
            )  # fmt: skip
        wait_for("steps of the job", lambda: self.ctl_rows("query", "SELECT 1 FROM train.steps LIMIT 1"))
        self.daemon.ctl("vars", "--job", self.job, "--watch", "--interval", "100ms", "step", "loss")

    def run(self, *argv: str | Path, log: Any = subprocess.DEVNULL, env: dict[str, str] | None = None) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))}
        self.processes.append(
            subprocess.Popen(
                [str(a) for a in argv], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env={**clean, "OMP_NUM_THREADS": "1", **(env or {})}, start_new_session=True,
            )
        )  # fmt: skip

    @property
    def job(self) -> str:
        return f"node1/127.0.0.1:{self.master}"

    def ctl_rows(self, *words: str) -> list[dict[str, Any]]:
        rows = self.daemon.json(*words)
        assert isinstance(rows, list)
        return rows

    def reported(self) -> dict[int, float]:
        """Loss by step, as rank 0 printed them."""
        found = re.findall(r"^step (\d+) loss ([\d.]+)$", self.log.read_text(), re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}

    def close(self) -> None:
        for process in self.processes:
            for pid in family(process.pid):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            process.communicate()
        remove(self.daemon)


@pytest.fixture(scope="module")
def founding(shared_base: Path) -> Iterator[Founding]:
    made = Founding(shared_base)
    try:
        made.start()
        yield made
    finally:
        made.close()


def ranks_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["rank"] for row in rows if row["rank"] is not None})


def test_1_list(founding: Founding) -> None:
    for words in (("list",), ("cluster", "list")):
        rows = [row for row in founding.ctl_rows(*words) if row["job"] == founding.job]
        assert ranks_of(rows) == [0, 1]
    remote = subprocess.run(
        [BIN / "probingctl", "-t", founding.address, "list"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert remote.returncode == 0
    assert founding.job in remote.stdout


def test_2_torch_trace_of_the_last_step(founding: Founding) -> None:
    sql = "SELECT * FROM python.torch_trace WHERE step = (SELECT MAX(step) FROM python.torch_trace)"
    assert wait_for("the last step", lambda: founding.ctl_rows("query", sql))
    # The machine may have other jobs: of ours, the count of steps grows as the job's own does.
    own = f"(SELECT * FROM python.torch_trace WHERE job = '{founding.job}')"
    before = max(founding.reported())
    rows = founding.ctl_rows("query", sql.replace("python.torch_trace", own))
    assert ranks_of(rows) in ([0], [1], [0, 1])
    assert {row["stage"] for row in rows} == {"post step"}
    assert all(row["duration"] >= 0.02 for row in rows)
    last = rows[0]["step"]
    newer = sql.replace("python.torch_trace", own) + f" AND step > {last}"
    rows = wait_for("more steps", lambda: founding.ctl_rows("query", newer))
    assert rows[0]["step"] - last <= max(founding.reported()) - before + 1


def test_3_training_metrics(founding: Founding) -> None:
    sql = "SELECT node, rank, step, loss FROM python.training_metrics ORDER BY step"

    def compared() -> list[dict[str, Any]]:
        rows = founding.ctl_rows("cluster", "query", sql)
        known = founding.reported()
        return [row for row in rows if row["rank"] == 0 and row["step"] in known and row["loss"] is not None][:-1]

    rows = wait_for("losses", lambda: (found := compared()) and len(found) >= 3 and found)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert {row["node"] for row in rows} == {"node1"}
    known = founding.reported()
    # The two variables are read while the step goes on: the loss may be of the step before it or after it already.
    for row in rows:
        near = [known[step] for step in range(row["step"] - 1, row["step"] + 2) if step in known]
        assert min(abs(row["loss"] - loss) for loss in near) < 1e-3


def test_4_backtrace(founding: Founding) -> None:
    done = subprocess.run(
        [BIN / "probingctl", "-t", founding.address, "backtrace"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "train (" in done.stdout or "train_step" in done.stdout
    assert "train_ddp.py" in done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist; print(f'Rank: {dist.get_rank()}/{dist.get_world_size()}')",
        "print(f'Step: {trainer.current_step}')",
    ],
)
def test_5_eval_says_what_is_nearest(code: str, founding: Founding) -> None:
    done = founding.daemon.ctl("eval", code, check=2)
    assert "in-process helper" in done.stderr
    assert "hint: " in done.stderr


def test_6_nccl_trace(founding: Founding) -> None:
    sql = (
        "SELECT operation, src_rank, dst_rank, bytes_transferred, duration_ms FROM python.nccl_trace"
        " WHERE step = (SELECT MAX(step) FROM python.nccl_trace) ORDER BY duration_ms DESC"
    )
    assert wait_for("operations of the last step", lambda: founding.ctl_rows("query", sql))
    own = f"(SELECT * FROM python.nccl_trace WHERE job = '{founding.job}')"
    rows = wait_for(
        "those of ours", lambda: founding.ctl_rows("query", sql.replace("python.nccl_trace", own))
    )
    assert {row["operation"] for row in rows} == {"all_reduce"}
    assert all(row["src_rank"] is None and row["dst_rank"] is None for row in rows)
    assert all(row["duration_ms"] > 0 for row in rows)
    # What a step moves, whatever buckets it comes in.
    sums = (
        f"SELECT rank, step, sum(bytes_transferred) AS bytes, count(*) AS n FROM {own}"
        " WHERE step BETWEEN 10 AND 30 GROUP BY ALL ORDER BY ALL"
    )
    told = wait_for("whole steps", lambda: (found := founding.ctl_rows("query", sums)) and len(found) == 42 and found)
    assert {int(row["bytes"]) for row in told} == {4 * PARAMETERS}
    collectives = founding.ctl_rows("query", "SELECT DISTINCT op, group_size FROM python.comm_collective")
    assert {"op": "all_reduce", "group_size": 2} in collectives


def test_7_rdma(founding: Founding) -> None:
    done = founding.daemon.ctl("rdma")
    devices = Path("/sys/class/infiniband")
    if devices.is_dir() and any(devices.iterdir()):
        assert all(path.name in done.stdout for path in devices.iterdir())
    else:
        assert done.stdout == "no RDMA devices on this node\n"


def test_8_deadlock(founding: Founding) -> None:
    port = free_port()
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        founding.run(sys.executable, "-c", HANGS, env=env)
    sql = (
        "SELECT func, file, lineno FROM python.backtrace"
        " WHERE func LIKE '%collective%' OR func LIKE '%allreduce%'"
    )
    rows = wait_for("the native frame", lambda: [r for r in founding.ctl_rows("query", sql) if "c10d::" in r["func"]])
    assert any("ProcessGroupGloo::allreduce" in row["func"] or "allreduce" in row["func"] for row in rows)
    assert all(row["file"].startswith("/") for row in rows)
    waits = f"SELECT DISTINCT rank FROM python.backtrace WHERE job LIKE '%:{port}' AND func LIKE '%allreduce%'"
    assert wait_for("who waits", lambda: founding.ctl_rows("query", waits)) == [{"rank": 0}]


def test_9_memory_balance(founding: Founding) -> None:
    sql = (
        "SELECT rank, AVG(allocated) avg_memory, MAX(allocated) peak_memory FROM python.torch_trace GROUP BY rank"
    )
    assert founding.ctl_rows("query", sql)
    own = f"(SELECT * FROM python.torch_trace WHERE job = '{founding.job}')"
    rows = founding.ctl_rows("query", sql.replace("python.torch_trace", own))
    # On the CPU nothing is asked of the CUDA runtime, and that is said as NULL, not as 0.
    expected = [{"rank": rank, "avg_memory": None, "peak_memory": None} for rank in range(2)]
    assert sorted(rows, key=lambda row: row["rank"]) == expected


def test_10_config_and_token_and_appended_traces(founding: Founding) -> None:
    told = founding.daemon.ctl("config", "probing.server.port=8080", check=2)
    assert "--listen" in told.stderr
    words = [
        "query", f"SELECT rank, count(*) AS n FROM comm.ops WHERE job = '{founding.job}' GROUP BY rank ORDER BY rank",
    ]  # fmt: skip
    told = founding.daemon.ctl("--token", "secret", *words)
    assert "warning: --token" in told.stderr
    traces = founding.daemon.base / "traces.json"
    environment = {**os.environ, "PROBING_TARGET": founding.daemon.target, "PROBING_AUTH_TOKEN": "secret"}
    command = f"probingctl query \"{words[1]}\" >> {traces}"
    for _ in range(2):
        subprocess.run(
            ["/bin/sh", "-c", command], env={**environment, "PATH": f"{BIN}:{os.environ['PATH']}"}, check=True,
            timeout=PATIENCE,
        )  # fmt: skip
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    assert [row["rank"] for row in rows if row["rank"] is not None] == [0, 1, 0, 1]


def test_11_expressions_and_own_tables_need_the_helper(founding: Founding) -> None:
    for sql in ("SELECT * FROM python.`time.time()`", "SELECT * FROM python.test"):
        done = founding.daemon.ctl("query", sql, check=1)
        assert done.stderr.startswith("error: ")
        assert "\nhint: " in done.stderr
    assert "helper" in founding.daemon.ctl("query", "SELECT * FROM python.`time.time()`", check=1).stderr
