"""What the tests of collectives share: jobs, and a session with the source on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from waiting import until, whole_lines

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.source import Identity, Processes

JOBS = Path(__file__).parents[1] / "jobs"
# In the gate, too: the other tests take uprobe_multi there.
both_ways = pytest.mark.parametrize("fallback", ["uprobe_multi", "fallback"], indirect=True)


def torch_library() -> Path:
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(found.stdout.strip()).parent / "lib" / "libtorch_cpu.so"


class Job:
    """Two ranks of ``direct_calls.py``, which execute commands."""

    def __init__(self, folder: Path, script: str = "direct_calls.py", **environ: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.lists = [folder / f"rank{rank}.jsonl" for rank in range(2)]
        self.ranks = []
        for rank, path in enumerate(self.lists):
            identity = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, JOBS / script, path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **identity, **master, **environ},
                )
            )

    def tell(self, command: str) -> None:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(command + "\n")
            rank.stdin.flush()

    def hear(self, word: str) -> None:
        for rank in self.ranks:
            assert rank.stdout
            assert rank.stdout.readline().strip() == word

    def do(self, command: str) -> None:
        self.tell(command)
        self.hear("done")

    def calls(self, since_ns: int = 0) -> list[dict[str, Any]]:
        lines = [json.loads(line) for path in self.lists for line in whole_lines(path)]
        return [line for line in lines if line["before_ns"] >= since_ns]

    def rank_of(self, pid: int) -> int | None:
        return next((rank for rank, process in enumerate(self.ranks) if process.pid == pid), None)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


class Known:
    """``Processes`` of the test's own jobs."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        for number, job in enumerate(self.jobs):
            if (rank := job.rank_of(pid)) is not None:
                return Identity(pid, start_ns, f"job{number}", "run", "trainer", rank, rank, 2, 0)
        return None


class Watcher:
    """A session and the source on it, as the collector puts them together."""

    def __init__(self, session: Session, processes: Processes) -> None:
        self.session = session
        self.source = CollectivesSource(session, processes, "node", find_symbols)
        self.source.start()
        self.ops: list[pa.RecordBatch] = []
        self.communicators: list[dict[str, Any]] = []

    def attach(self, library: Path) -> tuple[int, int]:
        """(the time before, the time when all probes were there), CLOCK_MONOTONIC ns."""
        before = time.monotonic_ns()
        fd = os.open(library, os.O_RDONLY)
        try:
            self.source.attach(fd, os.fsencode(library))
        finally:
            os.close(fd)
        return before, time.monotonic_ns()

    def drain(self) -> None:
        ring = self.session.rings["collectives"]
        drained = ring.drain()
        batches = self.source.assemble(drained.records, SystemClock().pair())
        if "comm.ops" in batches:
            self.ops.append(batches["comm.ops"])
        if "comm.communicators" in batches:
            self.communicators += plain(batches["comm.communicators"])
        ring.commit(drained.position)

    def rows(self, job: str = "job0") -> list[dict[str, Any]]:
        self.drain()
        return [row for batch in self.ops for row in plain(batch) if row["job"] == job]

    def wait_for_open(self, count: int) -> list[dict[str, Any]]:
        return until(lambda: found if len(found := self.inflight()) == count else None)

    def inflight(self) -> list[dict[str, Any]]:
        return [row for row in plain(self.source.inflight(SystemClock().pair())) if row["job"] == "job0"]


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    batch.validate(full=True)
    columns = {
        name: (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
