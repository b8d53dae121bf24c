"""RAS through real readers and parsers: processes that share an address, one that is stopped, another namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processes_helpers import start_ns_of, started

from probing.daemon.clock import SystemClock
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss

PATIENCE = 60.0
LISTENER = Path(__file__).parents[2] / "doubles" / "ras_listener.py"
COMM = "00000000feedbeef"
_CAP_SYS_ADMIN = 1 << 21
# The loopback of a new network namespace is down (SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP).
LOOPBACK_UP = """
import fcntl, runpy, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    name = b"lo".ljust(16, bytes(1))
    flags, = struct.unpack_from("16xh", fcntl.ioctl(any_socket, 0x8913, name + bytes(16)))
    fcntl.ioctl(any_socket, 0x8914, name + struct.pack("h14x", flags | 1))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Rows:
    """A sink."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.losses: list[Loss] = []

    def put(self, _: str, batch: pa.RecordBatch) -> None:
        self.rows.extend(batch.drop_columns(["ts"]).to_pylist())

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    ranks = [{"rank": i, "host": "10.0.0.1", "pid": 1, "collective_counts": {"AllReduce": 7}} for i in range(2)]
    communicator = {"hash": f"0x{COMM}", "secondary_hash": "0x1:0x2", "size": 2, "ranks": ranks}
    file = tmp_path / "report"
    file.write_text(json.dumps({"nccl_version": "2.30.7", "communicators": [communicator]}))
    return file


def rank(process: subprocess.Popen[bytes]) -> Identity:
    return Identity(process.pid, start_ns_of(process.pid), "job", "run", "trainer", 0, 0, 2, 0)


def witness_of(who: list[Identity], readers: ReaderPool, parsers: ParserPool, sink: Rows, port: int) -> RasWitness:
    def owners(comm: str) -> list[Identity]:
        return who if comm == COMM else []

    return RasWitness(lambda: who, owners, readers, parsers, sink, SystemClock(), "node", port=port)


def port_of(process: subprocess.Popen[bytes]) -> int:
    return int(process.line.split()[1])  # type: ignore[attr-defined]


def test_a_rank_that_is_stopped_does_not_keep_the_other_from_answering(
    report: Path, readers: ReaderPool, parsers: ParserPool
) -> None:
    command = [sys.executable, str(LISTENER), "127.0.0.1"]
    with started([*command, "0", "json", str(report)], until="ready") as first:
        port = port_of(first)
        with started([*command, str(port), "json", str(report)], until="ready") as second:
            sink = Rows()
            witness = witness_of([rank(first), rank(second)], readers, parsers, sink, port)
            os.kill(second.pid, signal.SIGSTOP)
            deadline = time.monotonic() + PATIENCE
            # The kernel picks who gets a connection: the one that is stopped may get all of a round.
            while not witness.ask_all():
                assert time.monotonic() < deadline
            assert [(row["comm_rank"], row["all_reduce"]) for row in sink.rows] == [(0, 7), (1, 7)]
            os.kill(first.pid, signal.SIGSTOP)
            assert witness.ask_all() == 0
            assert "does not answer" in witness.reason
            os.kill(second.pid, signal.SIGCONT)
            while not witness.ask_all():
                assert time.monotonic() < deadline
            assert witness.reason == ""
    assert {(row["job"], row["comm"]) for row in sink.rows} == {("job", COMM)}


def test_a_process_in_another_network_namespace(report: Path, readers: ReaderPool, parsers: ParserPool) -> None:
    inner = [sys.executable, "-c", LOOPBACK_UP, str(LISTENER), "127.0.0.1", "0", "json", str(report)]
    with started(["unshare", "--user", "--map-root-user", "--net", *inner], until="ready") as process:
        sink = Rows()
        witness = witness_of([rank(process)], readers, parsers, sink, port_of(process))
        found = witness.ask_all()
        if _may_enter():
            assert found == 2
            assert {(row["pid"], row["job"]) for row in sink.rows} == {(process.pid, "job")}
        else:
            assert found == 0
            assert witness.reason == "the process is in another network namespace, which needs CAP_SYS_ADMIN"
            assert len(sink.losses) == 1


def _may_enter() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & _CAP_SYS_ADMIN)


def test_the_environment_of_a_process_says_where_to_ask(report: Path, readers: ReaderPool, parsers: ParserPool) -> None:
    command = [sys.executable, str(LISTENER), "127.0.0.1", "0", "json", str(report)]
    sleeper = [sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"]
    with started(command, until="ready") as listener:
        named = {**os.environ, "NCCL_RAS_ADDR": f"127.0.0.1:{port_of(listener)}"}
        with started(sleeper, until="ready", env=named) as process:
            sink = Rows()
            witness = witness_of([rank(process)], readers, parsers, sink, 1)
            assert witness.ask_all() == 2
        off = {**named, "NCCL_RAS_ENABLE": "0"}
        with started(sleeper, until="ready", env=off) as process:
            assert witness_of([rank(process)], readers, parsers, sink, 1).ask_all() == 0
    assert len(sink.rows) == 2
