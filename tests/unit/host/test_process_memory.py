"""The source of process.memory against this process and one that has ended."""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa
import pytest

from probing.api.errors import TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.host import memory
from probing.daemon.host.memory import ProcessMemorySource
from probing.daemon.ipc import Message
from probing.daemon.processes.target import Target, states
from probing.daemon.source import Identity, Loss
from probing.daemon.source_state import Totals

TOTALS = Totals("running", {}, {})


class Reads:
    """Answers ``state`` as a reader does, in this process."""

    size = 1

    def __init__(self) -> None:
        self.calls = 0
        self.silent = False

    def call(self, op: str, **args: Any) -> Message:
        assert op == "state"
        self.calls += 1
        if self.silent:
            raise TargetTimeout("process 1 does not answer")
        return Message({}, json.dumps(states(args["targets"], False, args["memory"])).encode())

    def call_each(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("one request is enough")

    def forget(self, pid: int, start_ns: int) -> None:
        del pid, start_ns


class Kept:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        assert table == "process.memory"
        self.rows += batch.to_pylist()

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)


class Known:
    def __init__(self, *who: Identity) -> None:
        self.who = list(who)

    def live(self) -> list[Identity]:
        return self.who


def source(*who: Identity) -> tuple[ProcessMemorySource, Reads, Kept]:
    reads, kept = Reads(), Kept()
    return ProcessMemorySource(reads, Known(*who), kept, FakeClock(real_ns=5_000), "n1", 10.0), reads, kept


def own(role: str = "trainer", start_ns: int | None = None) -> Identity:
    with Target(os.getpid()) as target:
        return Identity(os.getpid(), target.start_ns if start_ns is None else start_ns, "j", "r", role, 3)


def test_a_row_for_each_trainer_and_loader_from_one_request() -> None:
    made, reads, kept = source(own(), own("data_loader"), own("launcher"), own(start_ns=7))
    made.tick()
    assert reads.calls == 1
    assert [(r["node"], r["job"], r["run"], r["pid"], r["role"]) for r in kept.rows] == [
        ("n1", "j", "r", os.getpid(), "trainer"),
        ("n1", "j", "r", os.getpid(), "data_loader"),
    ]
    assert all(r["rss_bytes"] > 1 << 20 and r["swap_bytes"] >= 0 for r in kept.rows)
    assert all(
        0 < r["anon_bytes"] <= r["rss_bytes"] <= r["peak_rss_bytes"] and r["shmem_bytes"] >= 0 for r in kept.rows
    )


def test_processes_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_PROCESSES", 2)
    made, _, kept = source(own(), own(), own("data_loader"))
    made.tick()
    assert len(kept.rows) == 2
    assert made.states(TOTALS)[0].reason == "1 processes are not read: more than 2 run"


def test_nothing_is_read_where_nothing_trains() -> None:
    made, reads, kept = source(own("launcher"))
    made.tick()
    assert (reads.calls, kept.rows) == (0, [])


def test_a_reader_that_does_not_answer_is_reported_until_one_does() -> None:
    made, reads, kept = source(own())
    reads.silent = True
    made.tick()
    assert (kept.rows, made.states(TOTALS)[0].reason) == ([], "process 1 does not answer")
    reads.silent = False
    made.tick()
    assert (len(kept.rows), made.states(TOTALS)[0].reason) == (1, "")
