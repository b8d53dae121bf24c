"""Steps of real jobs: what is concluded from the operations equals what the job itself wrote down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from collectives_support import JOBS, Job, Watcher, plain, torch_library
from long import long_unless
from waiting import until, whole_lines

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.nccl_uprobes.operations.source import OBJECTS
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.source import Identity, Loss

# A pair of clocks is asked one after the other, at each look: it is right to about a microsecond.
CLOCK_NS = 20_000
# How the probes are attached makes no difference here.
pytestmark = pytest.mark.parametrize("fallback", [False])
Open = Callable[..., Session]


class Ranks(Job):
    """A job of as many ranks as are asked for."""

    def __init__(self, folder: Path, script: str, size: int, **environ: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.lists = [folder / f"rank{rank}.jsonl" for rank in range(size)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **environ}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, JOBS / script, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            )
            for rank, path in enumerate(self.lists)
        ]

    def begun(self, rank: int) -> list[int]:
        """When each step began, CLOCK_MONOTONIC ns."""
        return [json.loads(line)["before_ns"] for line in whole_lines(self.lists[rank])]

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        rank = self.rank_of(pid)
        return None if rank is None else Identity(pid, start_ns, "job0", "run", "trainer", rank, rank, len(self.ranks))


class Rows:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        assert table == "train.steps"
        self.rows += plain(batch)

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)


class Observer:
    """The source on a session, with the conclusions behind it."""

    def __init__(self, session: Session, job: Ranks) -> None:
        self.watcher = Watcher(session, job)
        self.sink = Rows()
        self.steps = Steps("node", job, self.sink)
        # (rank, name of the communicator) -> its newest row
        self.groups: dict[tuple[int, str], dict[str, Any]] = {}
        self._seen = 0
        self.watcher.source.observers.append(self.steps.observe)

    def look(self) -> list[dict[str, Any]]:
        self.watcher.drain()
        rows = self.watcher.communicators[self._seen :]
        # Others may use gloo on this machine, too.
        self.groups |= {(row["job_rank"], row["comm"]): row for row in rows if row["job"]}
        self._seen = len(self.watcher.communicators)
        self.offset = SystemClock().pair().mono_to_utc_ns
        return self.sink.rows


@pytest.fixture
def start(open_session: Open, tmp_path: Path) -> Iterator[Callable[..., tuple[Ranks, Observer]]]:
    jobs: list[Ranks] = []

    def make(script: str, size: int = 2, **environ: str) -> tuple[Ranks, Observer]:
        jobs.append(Ranks(tmp_path, script, size, **environ))
        observer = Observer(open_session(*OBJECTS), jobs[-1])
        return jobs[-1], observer

    yield make
    for job in jobs:
        job.close()


def run(job: Ranks, observer: Observer) -> list[dict[str, Any]]:
    """Have steps made until those of all ranks are reported, and some more."""

    def all_reported() -> bool:
        job.do("steps 15")
        return len({row["rank"] for row in observer.look()}) == len(job.ranks)

    until(all_reported)
    job.do("steps 15")
    return observer.look()


def check_equal(job: Ranks, observer: Observer, rows: list[dict[str, Any]], first: int) -> None:
    """All ranks have all steps from ``first`` on, but for the last that cannot have ended, at one constant offset."""
    offsets = set()
    for rank in range(len(job.ranks)):
        mine = [row for row in rows if row["rank"] == rank]
        begun = [*job.begun(rank), 1 << 62]
        total = len(begun) - 1
        own = []
        for row in mine:
            start = row["ts"] - observer.offset
            number = next(n for n in range(len(begun) - 1) if start < begun[n + 1] - CLOCK_NS)
            assert begun[number] <= start + CLOCK_NS
            own.append(number)
            offsets.add(number - row["step"])
        assert own == list(range(own[0], own[-1] + 1))
        assert own[0] <= first
        # The last step has not ended, nor has the one before where a step begins in the middle of the job's own.
        assert own[-1] in (total - 3, total - 2)
        for row, following in pairwise(mine):
            assert abs(row["ts"] + row["duration_ns"] - following["ts"]) < CLOCK_NS
    assert len(offsets) == 1


@pytest.mark.parametrize("mode", ["plain", long_unless(False, "no_sync"), long_unless(False, "sync")])
def test_steps_of_data_parallel_jobs(start: Any, mode: str) -> None:
    job, observer = start("accumulation.py", MODE=mode)
    job.hear("ready")
    observer.watcher.attach(torch_library())
    rows = run(job, observer)
    # DDP makes its buckets anew after the first step.
    check_equal(job, observer, rows, 2)
    assert {row["source"] for row in rows} == {"collective_period"}
    assert min(row["step"] for row in rows) == 0
    for row in rows:
        assert 0.7 <= row["confidence"] <= 1
        assert 0 < row["comm_ns"] <= row["duration_ns"]
    assert {row["ops"] for row in rows} <= ({13} if mode == "sync" else {4, 5})


def test_a_job_without_a_period_has_no_steps(start: Any) -> None:
    job, observer = start("aperiodic.py")
    job.hear("ready")
    observer.watcher.attach(torch_library())

    def long_enough() -> bool:
        job.do("steps 200")
        assert observer.look() == []
        times = [row["ts"] for batch in observer.watcher.ops for row in plain(batch)]
        return len(times) >= 2 * 2000 and max(times) - min(times) > 4_000_000_000

    until(long_enough)


@pytest.mark.parametrize("named", ["0", long_unless(False, "1")])
def test_a_grid_of_groups(start: Any, named: str) -> None:
    job, observer = start("grid.py", size=4, NAMED=named)
    job.hear("ready")
    observer.watcher.attach(torch_library())
    check_equal(job, observer, run(job, observer), 0)
    until(lambda: job.do("steps 1") or (observer.look() and settled(observer)))
    members: dict[str, list[int]] = {}
    for rank, comm in sorted(observer.groups):
        members.setdefault(comm, []).append(rank)
    assert sorted(members.values()) == [[0, 1], [0, 1, 2, 3], [0, 2], [1, 3], [2, 3]]
    for (rank, comm), row in observer.groups.items():
        mine = members[comm]
        role, name, why = EXPECTED[len(mine) if len(mine) > 2 else mine[1] - mine[0]]
        assert (row["parallel_role"], row["size"], row["rank"]) == (role, len(mine), mine.index(rank))
        assert row["name"] == ("default_pg" if role == "world" else name if named == "1" else None)
        assert row["parallel_role_why"].startswith(why if named == "0" or role == "world" else f"its name is {name}")


# By the distance of neighbours, or the size of the world. Names are cut at 24 bytes.
EXPECTED = {
    1: ("tp", "TENSOR_MODEL_PARALLEL_GROUP", "its ranks are neighbours"),
    2: ("dp", "DATA_PARALLEL_GROUP", "its ranks are 2 apart"),
    4: ("world", "default_pg", "has all 4 ranks"),
}


def settled(observer: Observer) -> bool:
    return len(observer.groups) == 12 and all(row["parallel_role"] != "unknown" for row in observer.groups.values())
