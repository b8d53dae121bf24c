"""Calls of real optimizers, seen in libtorch_cpu: steps without collectives equal what the job wrote down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import JOBS, plain, torch_library
from long import long_unless
from waiting import until, whole_lines

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.nccl_uprobes.steps.optimizer_probes import OBJECTS, RING, OptimizerSource
from probing.daemon.nccl_uprobes.steps.optimizer_steps import FOREACH, FUSED, LIST_ADD
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.source import Identity, Loss

# How the probes are attached makes no difference here.
pytestmark = pytest.mark.parametrize("fallback", [False])


class Job:
    def __init__(self, folder: Path, kind: str) -> None:
        self.list = folder / "list"
        self.process = subprocess.Popen(
            [sys.executable, JOBS / "optimizers.py", self.list],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KIND": kind, "OMP_NUM_THREADS": "1"},
        )

    def hear(self, word: str) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline().strip() == word

    def steps(self, count: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"steps {count}\n")
        self.process.stdin.flush()
        self.hear("done")

    def begun(self) -> list[int]:
        """When each step began, CLOCK_MONOTONIC ns."""
        return [json.loads(line)["before_ns"] for line in whole_lines(self.list)]

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job", "run", "trainer") if pid == self.process.pid else None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Watch:
    """The source on a session, with the conclusions behind it. Also the sink."""

    def __init__(self, session: Session, job: Job) -> None:
        self.session, self.job = session, job
        self.source = OptimizerSource(session, find_symbols)
        self.steps = Steps("node", job, self)
        self.rows: list[dict[str, Any]] = []
        self.records: list[Any] = []

    def put(self, table: str, batch: Any) -> None:
        assert table == "train.steps"
        self.rows += plain(batch)

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)

    def attach(self) -> None:
        library = torch_library()
        fd = os.open(library, os.O_RDONLY)
        try:
            assert self.source.attach(fd, os.fsencode(library)) == 1
            assert self.source.attach(fd, os.fsencode(library)) == 0
        finally:
            os.close(fd)

    def look(self) -> list[dict[str, Any]]:
        ring = self.session.rings[RING]
        drained = ring.drain()
        records = drained.records
        self.records += [r for r in records if int(r["tgid"]) == self.job.process.pid]
        self.pair = SystemClock().pair()
        self.steps.observe_optimizer(records, self.pair)
        # What comes again changes nothing.
        self.steps.observe_optimizer(records, self.pair)
        ring.commit(drained.position)
        return self.rows


@pytest.fixture
def start(open_session: Callable[..., Session], tmp_path: Path) -> Iterator[Callable[[str], tuple[Job, Watch]]]:
    jobs: list[Job] = []

    def make(kind: str) -> tuple[Job, Watch]:
        job = Job(tmp_path, kind)
        jobs.append(job)
        watch = Watch(open_session(*OBJECTS), job)
        job.hear("ready")
        watch.attach()
        return job, watch

    yield make
    for job in jobs:
        job.close()


EXPECTED = {
    "fused": (FUSED, 1, 0.95, "the fused optimizer runs once in it (1 call)"),
    "foreach": (FOREACH, 1, 0.95, "the optimizer over lists of tensors runs once in it (1 call)"),
    "groups": (FOREACH, 3, 0.95, "the optimizer over lists of tensors runs once in it (3 calls)"),
    "sgd": (LIST_ADD, 1, 0.75, "sums of lists of tensors, as SGD makes them, runs once in it (1 call)"),
}


@pytest.mark.parametrize("kind", [long_unless(kind in ("fused", "foreach"), kind) for kind in EXPECTED])
def test_calls_and_steps_are_those_of_the_job(start: Callable[[str], tuple[Job, Watch]], kind: str) -> None:
    job, watch = start(kind)

    def reported() -> list[dict[str, Any]]:
        job.steps(5)
        return watch.look()

    until(lambda: len(reported()) > 20)
    rows = watch.rows
    which, calls, confidence, why = EXPECTED[kind]
    begun = job.begun()
    assert watch.session.counters()[f"probe:{which}"]["hits"] == len(begun) * calls
    seen = [r for r in watch.records if int(r["which"]) == which]
    # The last burst has not ended.
    assert sum(int(r["before_calls"]) for r in seen) in range((len(begun) - 1) * calls, len(begun) * calls)
    assert {int(r["left_out"]) for r in seen} == {0}
    last = [row["ts"] + row["duration_ns"] - watch.pair.mono_to_utc_ns for row in rows]
    # A step ends with its optimizer, before the next one begins.
    own = [sum(begin < end for begin in begun) - 1 for end in last]
    assert own == list(range(own[0], own[0] + len(rows)))
    # Of several groups, those before the first step that no other thread interrupts are not reported.
    assert own[0] <= 10
    assert len(begun) - own[-1] <= 3
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert {(row["source"], row["why"], row["ops"], row["comm_ns"]) for row in rows} == {
        ("optimizer_frame", why, 0, None)
    }
    assert {row["confidence"] for row in rows} == {confidence}


@pytest.mark.parametrize("kind", ["loop", long_unless(False, "plain_sgd")])
def test_a_loop_over_parameters_hits_no_probe(start: Callable[[str], tuple[Job, Watch]], kind: str) -> None:
    job, watch = start(kind)
    job.steps(30)
    assert watch.look() == []
    assert watch.records == []
