"""Stacks of ranks that run, are stopped, or hold the interpreter lock in C."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from e2e_support import EXAMPLE, Daemon
from ports import free_port
from waiting import until

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

Launch = Callable[..., Any]

HOLDS_GIL = """
    import ctypes, os, sys
    import torch.distributed as dist

    def hold():
        libc = ctypes.PyDLL(None)      # PyDLL keeps the interpreter lock while C runs
        open(sys.argv[1], "w").close()
        libc.pause()                   # line {line}

    dist.init_process_group("gloo")
    dist.barrier()
    hold()
"""


def main_threads(daemon: Daemon, job: str) -> dict[int, dict[str, Any]]:
    threads = daemon.json("stacks", "--job", job)
    return {t["rank"]: t for t in threads if t["tid"] == t["pid"]}


def script_frame(thread: dict[str, Any], script: Path) -> dict[str, Any] | None:
    return next((f for f in thread["frames"] if f["file"] == str(script)), None)


def test_main_threads_are_in_the_script(daemon: Daemon, training: str) -> None:
    def both() -> dict[int, dict[str, Any]] | None:
        if not [r for r in daemon.json("ps") if r["job"] == training and r["role"] == "trainer"]:
            return None
        threads = main_threads(daemon, training)
        return threads if set(threads) == {0, 1} and all(script_frame(t, EXAMPLE) for t in threads.values()) else None

    threads = until(both, what="both main threads in the script")
    source = EXAMPLE.read_text().splitlines()
    for thread in threads.values():
        assert thread["frames"][-1]["func"] == "<module>"
        frame = script_frame(thread, EXAMPLE)
        assert frame is not None
        # The line being executed, never the one that says `def`.
        line = source[frame["lineno"] - 1].strip()
        assert line
        assert not line.startswith("def ")


def ask(daemon: Daemon, request: node_pb2.StacksRequest) -> tuple[node_pb2.StacksReply, float]:
    """The answer on a warm channel, and how long it took in s."""
    with grpc.insecure_channel(daemon.target) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        stub.Status(node_pb2.StatusRequest(), timeout=5)
        begin = time.monotonic()
        reply = stub.Stacks(request, timeout=5)
        return reply, time.monotonic() - begin


def stacks_rpc(daemon: Daemon, pid: int) -> tuple[node_pb2.StacksReply, float]:
    return ask(daemon, node_pb2.StacksRequest(pids=[pid], timeout_ms=1000))


def stacks_rpc_of_job(daemon: Daemon, job: str) -> tuple[node_pb2.StacksReply, float]:
    return ask(daemon, node_pb2.StacksRequest(job=job, timeout_ms=1000))


def start_gil_holder(run_job: Launch, tmp_path: Path) -> tuple[Any, Path, int]:
    script = tmp_path / "holds_gil.py"
    script.write_text(textwrap.dedent(HOLDS_GIL).lstrip("\n"))
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "libc.pause()" in text)
    flag = tmp_path / "held"
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    job = run_job(sys.executable, script, flag, env=env)
    until(flag.exists, what="the lock to be held in C")
    until(lambda: Path(f"/proc/{job.pid}/stat").read_text().split()[2] == "S", what="the process to sleep in C")
    return job, script, line


def main_frame(reply: node_pb2.StacksReply, pid: int, script: Path) -> node_pb2.Frame:
    thread = next(t for t in reply.threads if t.tid == pid)
    return next(f for f in thread.frames if f.file == str(script))


def test_a_rank_that_holds_the_lock_in_c_and_is_stopped(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    job, script, line = start_gil_holder(run_job, tmp_path)
    until(lambda: [r for r in daemon.json("ps") if r["pid"] == job.pid], what="the trainer to be known")
    stacks_rpc(daemon, job.pid)
    # The fastest of five: what is asked is what the daemon can do, not what else this machine does meanwhile.
    answers = [stacks_rpc(daemon, job.pid) for _ in range(5)]
    assert min(seconds for _, seconds in answers) < 0.1
    for reply, _ in answers:
        frame = main_frame(reply, job.pid, script)
        assert (frame.func, frame.lineno) == ("hold", line)
        thread = next(t for t in reply.threads if t.tid == job.pid)
        assert thread.gil
        assert thread.complete
    os.kill(job.pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{job.pid}/stat").read_text().split()[2] == "T", what="the process to stop")
    stacks_rpc(daemon, job.pid)
    answers = [stacks_rpc(daemon, job.pid) for _ in range(5)]
    assert min(seconds for _, seconds in answers) < 0.1
    for reply, _ in answers:
        assert main_frame(reply, job.pid, script).lineno == line
        assert {t.state for t in reply.threads} == {"stopped"}
    assert [r["state"] for r in daemon.json("ps") if r["pid"] == job.pid] == ["stopped"]
    assert "TracerPid:\t0" in Path(f"/proc/{job.pid}/status").read_text()
