"""Daemons and jobs for benchmarks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from process_tree import arguments, family

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

__all__ = (
    "BIN",
    "BenchDaemon",
    "arguments",
    "cpu_ns",
    "family",
    "free_port",
    "job",
    "node_channel",
    "pss_bytes",
    "set_config",
)

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class BenchDaemon:
    """``probingd run`` with a state directory that is kept from one start to the next."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
        self.base.chmod(0o755)
        self.config = self.base / "probingd.toml"
        self.config.write_text(f'instance = "bench-{os.getpid()}"\n')
        self.socket = self.base / "d.sock"
        self.log = self.base / "log"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Starts the daemon. Returns the seconds from exec to `ready`."""
        begin = time.monotonic()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    BIN / "probingd",
                    "run",
                    "--config",
                    self.config,
                    "--state-dir",
                    self.base / "state",
                    "--socket",
                    self.socket,
                    "--node-name",
                    "bench",
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"the daemon did not start:\n{self.log.read_text()[-2000:]}")
        return time.monotonic() - begin

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def ctl(self, *args: str) -> str:
        done = self.run(*args)
        done.check_returncode()
        return done.stdout

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [BIN / "probingctl", "-t", f"unix:{self.socket}", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)


@contextlib.contextmanager
def node_channel(daemon: BenchDaemon) -> Iterator[node_pb2_grpc.NodeStub]:
    """Yields a stub whose channel is open already."""
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=unlimited) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        stub.Status(node_pb2.StatusRequest(), timeout=10)
        yield stub


def set_config(stub: node_pb2_grpc.NodeStub, **settings: str) -> None:
    """Changes settings for all processes; ``sampling_hz`` is the key sampling.hz."""
    for key, value in settings.items():
        stub.Config(node_pb2.ConfigRequest(key=key.replace("_", ".", 1), value=value), timeout=10)


@contextlib.contextmanager
def job(
    *argv: str | Path, ranks: int = 2, env: dict[str, str] | None = None, python: Path | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs a process for each rank, with the environment of a launcher, and kills it at the end."""
    port = str(free_port())
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **(env or {})}
        command = [python or sys.executable, *argv]
        started.append(subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def cpu_ns(pids: list[int]) -> int:
    """Returns the CPU time of the processes so far, from the scheduler's own count."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(task.read_text().split()[0])
    return total


def pss_bytes(pid: int) -> int:
    """Returns the proportional share of memory; 0 for a process that has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0
