"""Code run in the ranks of a real job through the whole daemon; without enabling nothing of it can be reached."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from e2e_support import BIN, EXAMPLE, Daemon, end_process, start_ranks
from ports import free_port
from waiting import until

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.ipc import connect

INJECTOR = "probing.daemon.confined.injector"


def test_code_in_the_ranks_of_a_job(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """A daemon of its own: it is configured for this."""
    daemon = make_daemon("n1", "--inject.enabled=true", "--inject.users=root").start()
    port = free_port()
    job = f"n1/127.0.0.1:{port}"
    ranks = start_ranks(tmp_path / "job.log", EXAMPLE, "--steps", "1000000", "--delay-ms", "20", port=port)
    try:
        running = f"SELECT rank, pid FROM process.processes WHERE role = 'trainer' AND job = '{job}' ORDER BY rank"
        until(lambda: len(daemon.rows(running)) == 2, what="two ranks")
        rows = daemon.rows(running)
        counted = f"SELECT count(*) AS n FROM comm.ops WHERE job = '{job}'"
        until(lambda: daemon.rows(counted)[0]["n"] > 20, what="operations before it")
        code = "import torch.distributed as dist; print(dist.get_rank(), dist.get_world_size(), dist.get_backend())"
        found = daemon.json("eval", "--job", job, "--limit", "20s", code)
        assert [(one["rank"], one["pid"], one["output"]) for one in found] == [
            (row["rank"], row["pid"], f"{row['rank']} 2 gloo\n") for row in rows
        ]
        assert daemon.ctl("eval", "--job", job, "--rank", "1", "--limit", "20s", "__name__").stdout == "'__main__'\n"
        typed = (
            "import torch.distributed as dist\nrank = dist.get_rank()\nrank * 2 + 5\n'world', dist.get_world_size()\n"
        )
        repl = (BIN / "probingctl", "-t", daemon.target, "repl", "--job", job, "--limit", "20s")
        done = subprocess.run(repl, input=typed, capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout == "rank 0:\n5\nrank 1:\n7\nranks 0-1:\n('world', 2)\n", done.stderr
        assert daemon.json("eval", "--job", job, "--limit", "20s", "'rank' in globals()")[0]["value"] == "False"
        expression = (
            f"SELECT rank, size FROM python.`[{{'size': __import__('torch').ones(23).numel()}}]` WHERE job = '{job}'"
        )
        assert daemon.json("query", f"{expression} ORDER BY rank") == [{"rank": rank, "size": 23} for rank in range(2)]
        clock = f"SELECT count(*) AS n FROM python.`time.time()` WHERE job = '{job}' AND value > 1e9"
        assert daemon.json("query", clock) == [{"n": 2}]
        failed = daemon.ctl("eval", str(rows[0]["pid"]), "--limit", "20s", "1 // 0", check=1)
        assert "the code raised ZeroDivisionError" in failed.stderr

        audit = daemon.rows("SELECT rank, pid, caller, state, code, result FROM probing.audit ORDER BY ts")
        assert [(row["state"], row["result"]) for row in audit if row["code"] == "1 // 0"] == [
            ("begun", ""),
            ("ended", "the code raised ZeroDivisionError"),
        ]
        assert {row["caller"].partition(",")[0] for row in audit} == {"unix: uid 0"}
        assert "had code run in 1 process" in daemon.ctl("ps").stdout
        # While a process is stopped, its injector may have the highest priority.
        asking = subprocess.Popen(
            (BIN / "probingctl", "-t", daemon.target, "eval", str(rows[0]["pid"]), "while 1: pass")
        )
        [injector] = until(lambda: daemon.children().get(INJECTOR), what="an injector")
        until(lambda: is_urgent(injector), what=Path(f"/proc/{injector}/limits").read_text)
        assert asking.wait() == 1
        until(lambda: not daemon.children().get(INJECTOR), what="the end of the injectors")
        before = daemon.rows(counted)[0]["n"]
        until(lambda: daemon.rows(counted)[0]["n"] > before + 20, what="operations after it")
    finally:
        end_process(ranks)


def is_urgent(pid: int) -> bool:
    """Returns whether a process may have real-time priority, or has the highest ordinary priority."""
    limit = re.search(r"Max realtime priority +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    return (limit is not None and limit[1] == "1") or os.getpriority(os.PRIO_PROCESS, pid) == -20


def test_without_enabling_nothing_can_be_reached(daemon: Daemon) -> None:
    inner = Path(f"{daemon.socket}.d")
    assert (inner / "reader.sock").is_socket()
    assert not (inner / "injector.sock").exists()
    assert "not enabled" in daemon.ctl("eval", str(os.getpid()), "1", check=1).stderr
    with grpc.insecure_channel(daemon.target) as channel, pytest.raises(grpc.RpcError) as caught:
        NodeStub(channel).Eval(pb.EvalRequest(rank=0, code="1"), timeout=30)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    # The service itself could not ask for it either.
    with connect(str(inner / "control" / "collector.sock")) as control, pytest.raises(UsageError, match="no request"):
        control.request({"op": "eval", "pids": [1], "code": "1", "seconds": 1.0}, timeout=30)
    assert INJECTOR not in daemon.children()
    assert daemon.rows("SELECT count(*) AS n FROM probing.audit") == [{"n": 0}]
