"""The source of process.memory against this process and one that has ended."""

from __future__ import annotations

import os

import pytest
from fakes import Processes, Readers, Sink

from probing.api.errors import TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.host import memory
from probing.daemon.host.memory import ProcessMemorySource
from probing.daemon.processes.target import Target, states
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals

TOTALS = Totals("running", {}, {})


def source(*who: Identity) -> tuple[ProcessMemorySource, Readers, Sink]:
    reads = Readers(state=lambda args: states(args["targets"], False, args["memory"]))
    kept = Sink("process.memory", may_lose=False)
    return ProcessMemorySource(reads, Processes(*who), kept, FakeClock(real_ns=5_000), "n1", 10.0), reads, kept


def own(role: str = "trainer", start_ns: int | None = None) -> Identity:
    with Target(os.getpid()) as target:
        return Identity(os.getpid(), target.start_ns if start_ns is None else start_ns, "j", "r", role, 3)


def test_a_row_for_each_trainer_and_loader_from_one_request() -> None:
    made, reads, kept = source(own(), own("data_loader"), own("launcher"), own(start_ns=7))
    made.tick()
    assert reads.count("state") == 1
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
    assert (reads.asked, kept.rows) == ([], [])


def test_a_reader_that_does_not_answer_is_reported_until_one_does() -> None:
    made, reads, kept = source(own())
    answer = reads.answers["state"]
    reads.answers["state"] = lambda _: TargetTimeout("process 1 does not answer")
    made.tick()
    assert (kept.rows, made.states(TOTALS)[0].reason) == ([], "process 1 does not answer")
    reads.answers["state"] = answer
    made.tick()
    assert (len(kept.rows), made.states(TOTALS)[0].reason) == (1, "")
