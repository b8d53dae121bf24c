"""Dumps that real jobs write, through real readers and parsers; files that are set as traps."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processes_helpers import start_ns_of, started
from waiting import until

from probing.api.errors import ProcessGone, UnsupportedTarget
from probing.daemon.clock import SystemClock
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss

PATIENCE = 30.0
# A job of one rank that writes its own dump, as ProcessGroupNCCL does when a collective timed out.
JOB = """
import os, signal, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
for size in range(1, 4):
    dist.all_reduce(torch.ones(size, 8))
dist.barrier()
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "wb") as file:
    file.write(_dump_fr_trace())
print("ready", flush=True)
signal.pause()
"""
SLEEPER = "import signal; print('ready', flush=True); signal.pause()"


class Rows:
    """A sink."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.losses: list[Loss] = []

    def put(self, _: str, batch: pa.RecordBatch) -> None:
        self.rows.extend(batch.drop_columns(["ts"]).to_pylist())

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)


class Living:
    def __init__(self, who: Identity) -> None:
        self.processes = [who]

    def live(self) -> list[Identity]:
        return self.processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with started([sys.executable, "-c", SLEEPER], until="ready") as process:
        yield process


def identity(pid: int) -> Identity:
    return Identity(pid, start_ns_of(pid), "job", "run", "trainer", 0, 0, 1, 0)


def files(readers: ReaderPool, pid: int, *paths: str) -> Any:
    return readers.call("files", timeout=PATIENCE, process=[pid, start_ns_of(pid)], paths=list(paths)).header


def opened(readers: ReaderPool, pid: int, path: str, **args: Any) -> bytes:
    answer = readers.call("file", timeout=PATIENCE, process=[pid, start_ns_of(pid)], path=path, **args)
    fd = answer.take_fd()
    try:
        return os.pread(fd, 1000, 0)
    finally:
        os.close(fd)


def test_the_dump_of_a_torch_job_becomes_rows(tmp_path: Path, readers: ReaderPool, parsers: ParserPool) -> None:
    environment = {**os.environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/fr_", "TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, "-c", JOB, str(tmp_path / "store")]
    with started(command, until="ready", env=environment) as job:
        sink, living = Rows(), Living(identity(job.pid))
        watch = FlightRecorderWatch(living, readers, parsers, sink, SystemClock(), "node", interval_s=0.0)
        until(watch.look)
        assert not watch.look()
    whole = pickle.loads((tmp_path / "fr_0").read_bytes())
    assert [row["profiling_name"] for row in sink.rows] == ["gloo:all_reduce"] * 3 + ["gloo:barrier"]
    assert [row["input_sizes"] for row in sink.rows] == ["[[1,8]]", "[[2,8]]", "[[3,8]]", "[]"]
    assert [row["collective_seq_id"] for row in sink.rows] == [1, 2, 3, 4]
    assert [row["time_created_ns"] for row in sink.rows] == [e["time_created_ns"] for e in whole["entries"]]
    assert {(row["job"], row["pid"], row["rank"], row["world_size"], row["version"]) for row in sink.rows} == {
        ("job", job.pid, 0, 1, whole["version"])
    }
    assert all("all_reduce" in row["top_frame"] or "barrier" in row["top_frame"] for row in sink.rows)
    assert not sink.losses


def test_a_dump_is_read_after_the_process_has_ended(tmp_path: Path, readers: ReaderPool, parsers: ParserPool) -> None:
    environment = {**os.environ, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/fr_"}
    sink = Rows()
    with started([sys.executable, "-c", SLEEPER], until="ready", env=environment) as process:
        living = Living(identity(process.pid))
        watch = FlightRecorderWatch(living, readers, parsers, sink, SystemClock(), "node", interval_s=0.0)
        assert not watch.look()
        (tmp_path / "fr_0").write_bytes(pickle.dumps({"entries": [{"record_id": 1}], "version": "2.9"}))
    living.processes = []
    assert watch.look() == 1
    assert [(row["record_id"], row["pid"]) for row in sink.rows] == [(1, process.pid)]


def test_a_pickle_that_calls_is_refused_by_the_parser(tmp_path: Path, readers: ReaderPool, parsers: ParserPool) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/made",)

    environment = {**os.environ, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/fr_"}
    with started([sys.executable, "-c", SLEEPER], until="ready", env=environment) as process:
        (tmp_path / "fr_0").write_bytes(pickle.dumps({"entries": [Call()]}))
        sink = Rows()
        living = Living(identity(process.pid))
        watch = FlightRecorderWatch(living, readers, parsers, sink, SystemClock(), "node", interval_s=0.0)
        until(lambda: watch.look() or sink.losses)
    assert "plain data" in sink.losses[0].reason
    assert not sink.rows
    assert not (tmp_path / "made").exists()


def test_only_regular_files_of_the_process_s_user_are_found(
    tmp_path: Path, readers: ReaderPool, sleeper: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "dump").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "dump")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    names = ["dump", "link", "folder", "pipe", "nothing"]
    found = files(readers, sleeper.pid, *(f"{tmp_path}/{name}" for name in names), "/dev/zero")
    assert [bool(file) for file in found["files"]] == [True, True, False, False, False, False]
    assert found["uid"] == os.getuid()
    assert opened(readers, sleeper.pid, f"{tmp_path}/link") == b"content"
    for name in names[2:]:
        with pytest.raises(UnsupportedTarget):
            opened(readers, sleeper.pid, f"{tmp_path}/{name}")
    with pytest.raises(UnsupportedTarget):
        opened(readers, sleeper.pid, f"{tmp_path}/dump", uid=os.getuid() + 1)
    # A link into /proc could lead to any file that a process has open.
    (tmp_path / "magic").symlink_to(f"/proc/{sleeper.pid}/exe")
    with pytest.raises(UnsupportedTarget):
        opened(readers, sleeper.pid, f"{tmp_path}/magic")


def test_paths_hold_the_process_s_variables_and_working_directory(tmp_path: Path, readers: ReaderPool) -> None:
    (tmp_path / "dump").write_bytes(b"1")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SECRET": "/"}
    command = [sys.executable, "-c", SLEEPER]
    with started(command, until="ready", env=environment, cwd=tmp_path) as process:
        found = files(readers, process.pid, "$HOME/dump", "$XDG_CACHE_HOME/dump", "dump", "$SECRET/etc/passwd")
        assert [bool(file) for file in found["files"]] == [True, False, True, False]
        assert found["paths"][:2] == [f"{tmp_path}/dump", None]
        assert found["witness"] == 0


def test_a_process_that_ended_has_no_files(readers: ReaderPool) -> None:
    with started([sys.executable, "-c", SLEEPER], until="ready") as process:
        start_ns = start_ns_of(process.pid)
    with pytest.raises(ProcessGone):
        readers.call("files", timeout=PATIENCE, process=[process.pid, start_ns], paths=["/etc/hostname"])
