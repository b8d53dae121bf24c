"""The commands of the founding documents, word for word but for the program's name, against a live job of two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import BIN, JOBS, PATIENCE, Daemon, end_process, start_ranks
from ports import free_port
from waiting import until

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
    """The shared daemon, which listens on TCP too, and the example job that it watches."""

    def __init__(self, daemon: Daemon, job: str, log: Path) -> None:
        words = dict(zip(daemon.extra[::2], daemon.extra[1::2], strict=True))
        self.daemon, self.job, self.log = daemon, job, log
        self.address, self.token_file = words["--listen"], words["--token-file"]

    def ctl_rows(self, *words: str) -> list[dict[str, Any]]:
        rows = self.daemon.json(*words)
        assert isinstance(rows, list)
        return rows

    def rows_of(self, table: str, where: str = "true", what: str = "rank", least: int = 1) -> list[dict[str, Any]]:
        """``what`` of rows of our job, which need not be the only one here, as soon as there are ``least``."""
        sql = f"SELECT {what} FROM (SELECT * FROM {table} WHERE job = '{self.job}') AS own WHERE {where}"
        found = until(lambda: (rows := self.daemon.rows(sql)) and len(rows) >= least and rows, what=f"rows of {table}")
        assert isinstance(found, list)
        return found

    def reported(self) -> dict[int, float]:
        """Loss by step, as rank 0 printed them."""
        found = re.findall(r"^step (\d+) loss ([\d.]+)$", self.log.read_text(), re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def founding(shared_daemon: Daemon, stepping: str, training_log: Path) -> Iterator[Founding]:
    shared_daemon.ctl("vars", "--job", stepping, "--watch", "--interval", "100ms", "step", "loss")
    yield Founding(shared_daemon, stepping, training_log)
    shared_daemon.ctl("vars", "--job", stepping, "--unwatch")


def ranks_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["rank"] for row in rows if row["rank"] is not None})


def test_1_list(founding: Founding) -> None:
    founding.rows_of("process.processes", "rank IS NOT NULL", least=2)
    for words in (("list",), ("cluster", "list")):
        rows = [row for row in founding.ctl_rows(*words) if row["job"] == founding.job]
        assert ranks_of(rows) == [0, 1]
    remote = subprocess.run(
        [BIN / "probingctl", "-t", founding.address, "--token-file", founding.token_file, "list"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert remote.returncode == 0
    assert founding.job in remote.stdout


def test_2_torch_trace_of_the_last_step(founding: Founding) -> None:
    before = max(founding.reported())
    old = founding.rows_of("python.torch_trace", "true", "max(step) AS step")[0]["step"]
    rows = founding.ctl_rows(
        "query", "SELECT * FROM python.torch_trace WHERE step = (SELECT MAX(step) FROM python.torch_trace)"
    )
    assert {row["stage"] for row in rows} == {"post step"}
    assert len({row["step"] for row in rows}) == 1
    # Steps are counted from the first that was seen: of ours the count grows as the job's own does.
    rows = founding.rows_of("python.torch_trace", f"step >= {old} + 10", "rank, step, duration")
    assert set(ranks_of(rows)) <= {0, 1}
    assert all(row["duration"] >= 0.02 for row in rows)
    assert max(row["step"] for row in rows) - old <= max(founding.reported()) - before + 1


def test_3_training_metrics(founding: Founding) -> None:
    founding.rows_of("python.training_metrics", "rank = 0 AND loss IS NOT NULL", least=5)
    rows = founding.ctl_rows(
        "cluster", "query", "SELECT node, rank, step, loss FROM python.training_metrics ORDER BY step"
    )
    assert {row["node"] for row in rows} == {"n1"}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    known = founding.reported()
    own = founding.rows_of("python.training_metrics", "rank = 0 AND loss IS NOT NULL", "step, loss")
    compared = [row for row in own if row["step"] + 1 in known]
    assert compared
    # The two variables are read while the step goes on: the loss may be of the step before it or after it already.
    for row in compared:
        near = [known[step] for step in range(row["step"] - 1, row["step"] + 2) if step in known]
        assert min(abs(row["loss"] - loss) for loss in near) < 1e-3


def test_4_backtrace(founding: Founding) -> None:
    done = subprocess.run(
        [BIN / "probingctl", "-t", founding.address, "--token-file", founding.token_file, "backtrace"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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
def test_5_eval_where_it_is_not_enabled_says_what_is_nearest(code: str, founding: Founding) -> None:
    done = founding.daemon.ctl("eval", "--rank", "0", code, check=1)
    assert "not enabled" in done.stderr
    assert "hint: " in done.stderr
    assert "probingctl " in done.stderr.partition("hint: ")[2]


def test_6_nccl_trace(founding: Founding) -> None:
    # What 21 steps of two ranks move, in whatever buckets.
    (last,) = founding.rows_of("python.nccl_trace", "step IS NOT NULL", "max(step) AS step")
    first, end = last["step"] + 1, last["step"] + 22
    founding.rows_of("python.nccl_trace", f"step > {end} GROUP BY rank", "rank", 2)
    moved = "rank, step, sum(bytes_transferred) AS bytes"
    sums = founding.rows_of("python.nccl_trace", f"step >= {first} AND step < {end} GROUP BY ALL", moved, 42)
    assert len(sums) == 42
    assert {int(row["bytes"]) for row in sums} == {4 * PARAMETERS}
    rows = founding.ctl_rows(
        "query",
        "SELECT operation, src_rank, dst_rank, bytes_transferred, duration_ms FROM python.nccl_trace"
        " WHERE step = (SELECT MAX(step) FROM python.nccl_trace) ORDER BY duration_ms DESC",
    )
    assert rows
    durations = [row["duration_ms"] for row in rows if row["duration_ms"] is not None]
    assert durations == sorted(durations, reverse=True)
    rows = founding.rows_of("python.nccl_trace", "step > 5", "operation, src_rank, dst_rank, duration_ms")
    assert {row["operation"] for row in rows} == {"all_reduce"}
    assert {(row["src_rank"], row["dst_rank"]) for row in rows} == {(None, None)}
    assert all(row["duration_ms"] > 0 for row in rows)
    kinds = founding.rows_of("python.comm_collective", "op = 'all_reduce'", "DISTINCT group_size, tensor_dtype")
    assert kinds == [{"group_size": 2, "tensor_dtype": "float32"}]


def test_7_rdma(founding: Founding) -> None:
    done = founding.daemon.ctl("rdma")
    devices = Path("/sys/class/infiniband")
    if devices.is_dir() and any(devices.iterdir()):
        assert all(path.name in done.stdout for path in devices.iterdir())
    else:
        assert done.stdout == "no RDMA devices on this node\n"


def test_8_deadlock(founding: Founding, run_job: Callable[..., subprocess.Popen[Any]]) -> None:
    port = free_port()
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_job(sys.executable, "-c", HANGS, env=env, stdin=subprocess.PIPE)
    waits = f"SELECT DISTINCT rank FROM python.backtrace WHERE job LIKE '%:{port}' AND func LIKE '%allreduce%'"
    assert until(lambda: founding.daemon.rows(waits), what="who waits") == [{"rank": 0}]
    sql = "SELECT func, file, lineno FROM python.backtrace WHERE func LIKE '%collective%' OR func LIKE '%allreduce%'"
    rows = until(lambda: [r for r in founding.ctl_rows("query", sql) if "c10d::" in r["func"]], what="the native frame")
    assert all(row["file"].startswith("/") and row["lineno"] is None for row in rows), rows


def test_9_memory_balance(founding: Founding) -> None:
    sql = "SELECT rank, AVG(allocated) avg_memory, MAX(allocated) peak_memory FROM python.torch_trace GROUP BY rank"
    assert founding.ctl_rows("query", sql)
    # On the CPU nothing is asked of the CUDA runtime, and that is said as NULL, not as 0.
    own = founding.rows_of("python.torch_trace", "true GROUP BY rank", "rank, MAX(allocated) AS peak", 2)
    assert sorted(own, key=lambda row: row["rank"]) == [{"rank": rank, "peak": None} for rank in range(2)]


def test_10_config_and_token_and_appended_traces(founding: Founding) -> None:
    told = founding.daemon.ctl("config", "probing.server.port=8080", check=2)
    assert "--listen" in told.stderr
    words = [
        "query",
        f"SELECT rank, count(*) AS n FROM comm.ops WHERE job = '{founding.job}' GROUP BY rank ORDER BY rank",
    ]
    told = founding.daemon.ctl("--token", "secret", *words)
    assert "warning: --token" in told.stderr
    traces = founding.daemon.base / "traces.json"
    environment = {**os.environ, "PROBING_TARGET": founding.daemon.target, "PROBING_AUTH_TOKEN": "secret"}
    command = f'probingctl query "{words[1]}" >> {traces}'
    for _ in range(2):
        subprocess.run(
            ["/bin/sh", "-c", command],
            env={**environment, "PATH": f"{BIN}:{os.environ['PATH']}"},
            check=True,
            timeout=PATIENCE,
        )
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    assert [row["rank"] for row in rows if row["rank"] is not None] == [0, 1, 0, 1]


def test_11_expressions_and_own_tables_say_what_they_need(founding: Founding) -> None:
    for sql in ("SELECT * FROM python.`time.time()`", "SELECT * FROM python.test"):
        done = founding.daemon.ctl("query", sql, check=1)
        assert done.stderr.startswith("error: ")
        assert "\nhint: " in done.stderr
    assert "not enabled" in founding.daemon.ctl("query", "SELECT * FROM python.`time.time()`", check=1).stderr


def test_5_and_11_where_code_is_allowed(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """The same snippets as written, on a node whose administrator has enabled ``eval``."""
    daemon, port = make_daemon("n1", "--inject.enabled=true", "--inject.users=root").start(), free_port()
    ranks = start_ranks(tmp_path / "job.log", JOBS / "founding_trainer.py", port=port)
    try:
        job = f"n1/127.0.0.1:{port}"
        own = f"SELECT rank FROM process.processes WHERE role = 'trainer' AND job = '{job}'"
        until(lambda: len(daemon.rows(own)) == 2, what=daemon.tail)
        counted = f"SELECT count(*) AS n FROM comm.ops WHERE job = '{job}'"
        until(lambda: daemon.rows(counted)[0]["n"] > 23, what=daemon.tail)
        code = "import torch.distributed as dist; print(f'Rank: {dist.get_rank()}/{dist.get_world_size()}')"
        assert daemon.ctl("eval", "--rank", "0", "--limit", "20s", code).stdout == "Rank: 0/2\n"
        step = daemon.ctl("eval", "--rank", "1", "--limit", "20s", "print(f'Step: {trainer.current_step}')").stdout
        assert re.fullmatch(r"Step: [1-9]\d*\n", step), step
        repl = (BIN / "probingctl", "-t", daemon.target, "repl", "--rank", "0", "--limit", "20s")
        typed = "step = trainer.current_step\nstep > 0\n"
        done = subprocess.run(repl, input=typed, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert done.stdout == "True\n", done.stderr

        times = daemon.json("query", "SELECT * FROM python.`time.time()`")
        assert [row["rank"] for row in times] == [0, 1]
        assert all(row["value"] > 1.7e9 for row in times)
        until(lambda: _rows(daemon, "SELECT * FROM python.test") == 2, what=daemon.tail)
        rows = daemon.rows("SELECT * FROM python.test ORDER BY rank")
        assert [(row["rank"], row["col1"], row["col2"]) for row in rows] == [(0, 0, "first"), (1, 1, "first")]
        assert {(row["x"], row["y"]) for row in daemon.rows("SELECT * FROM python.points")} == {(7, 0.5)}
        phases = "SELECT DISTINCT name, phase FROM python.trace_event ORDER BY name"
        until(lambda: len(daemon.rows(phases)) == 2, what=daemon.tail)
        assert [row["name"] for row in daemon.rows(phases)] == ["forward", "optimizer"]
    finally:
        end_process(ranks)


def _rows(daemon: Daemon, sql: str) -> int:
    """Returns the number of rows; 0 while the daemon does not know the table yet."""
    done = daemon.ctl("-f", "json", "query", sql, check=None)
    return len(json.loads(done.stdout)) if done.returncode == 0 else 0


def test_the_state_directory_is_whole_while_the_daemon_runs(founding: Founding) -> None:
    command = [BIN / "probingd", "verify", "--config", founding.daemon.config, "--state-dir", founding.daemon.state]
    done = subprocess.run([*command, "-f", "json"], capture_output=True, text=True, timeout=PATIENCE)
    told = json.loads(done.stdout)
    assert [f"{problem['path']}: {problem['what']}" for problem in told["problems"]] == []
    assert done.returncode == 0
    assert told["daemon_pid"]
    assert told["segments"] + told["log_parts"] > 0
