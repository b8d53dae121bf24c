"""A job that calls NCCL, without a GPU: the tables and `probingctl nccl` say what it did, whatever happens to us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from double_jobs import SIZE, Job, Row, check, is_replaced, ready
from doubles.doubles import Doubles
from e2e_support import JOBS, Daemon
from long import long
from waiting import until


def test_operations_and_communicators_of_a_job(daemon: Daemon, start_job: Callable[[], Job]) -> None:
    job = start_job()
    ready(daemon, job)
    for command in (
        *("do 5 all_reduce 1000 7 4", "do 3 broadcast 100 6 0 2", "do 3 reduce_scatter 13 9 2", "do 2 all_gather 17 5"),
        *("group 4 all_reduce 23 8 1", "ring 3 10", "style blocking", "do 2 all_reduce 43 7", "style side"),
    ):
        assert job.ranks.do(command) == [0] * SIZE
    job.ranks.finish()
    world = next(made["comm"] for made in job.ranks.made() if made["name"] == "world")
    calls = [call for call in job.ranks.calls() if call.comm == world]
    rows = job.wait_for_operations(daemon, len(calls), f"comm = '{world}'")
    check(rows, calls)
    assert {row["timing_source"] for row in rows if row["count"] == 1000} == {"watchdog"}
    assert {row["timing_source"] for row in rows if row["count"] == 43} == {"blocking_wait"}
    known = daemon.rows(
        "SELECT DISTINCT rank, size, job_rank, name, made_by, identity, state FROM comm.communicators"
        f" WHERE job = '{job.name}' AND comm = '{world}' AND made_by IS NOT NULL ORDER BY rank"
    )
    assert known == [
        {"rank": rank, "size": SIZE, "job_rank": rank, "name": "world", "made_by": "init_rank_config"}
        | {"identity": "struct", "state": "active"}
        for rank in range(SIZE)
    ]


@long
def test_a_hung_rank_is_shown(daemon: Daemon, start_job: Callable[[], Job]) -> None:
    job = start_job()
    ready(daemon, job)
    job.ranks.do("do 2 all_reduce 5 7")
    job.ranks.do("drain")
    job.ranks.do("do 1 all_gather 7 7", [0, 1])

    def waiting() -> list[Row]:
        found = daemon.json("nccl", "--job", job.name)
        return [row for comm in found for row in comm["inflight"] if row["op"] == "all_gather"]

    rows = until(lambda: len(rows := waiting()) == 2 and rows, what="operations in flight")
    assert [(row["rank"], row["seq"], row["state"]) for row in rows] == [(0, 2, "launched"), (1, 2, "launched")]
    assert all(row["age_ns"] > 0 for row in rows)
    # People see what has been in flight for a second.
    until(lambda: "all_gather" in daemon.ctl("nccl", "--job", job.name).stdout, what="all_gather in the text")
    # The third rank comes, and nobody waits any longer.
    job.ranks.do("do 1 all_gather 7 7", [2])
    job.ranks.finish()
    until(lambda: not waiting(), what="no operation in flight")
    assert {row["state"] for row in job.wait_for_operations(daemon, SIZE, "op = 'all_gather'")} == {"done"}


@long
def test_an_abort_ends_what_was_open(daemon: Daemon, start_job: Callable[[], Job]) -> None:
    job = start_job()
    ready(daemon, job)
    job.ranks.do("do 2 all_reduce 5 7")
    job.ranks.do("drain")
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    until(
        lambda: len(daemon.rows(f"SELECT pid FROM comm.inflight WHERE job = '{job.name}' AND op = 'all_gather'")) == 2,
        what="operations in flight",
    )
    job.ranks.do("abort world", [0, 1])
    rows = job.wait_for_operations(daemon, 2, "op = 'all_gather'")
    assert [(row["rank"], row["state"]) for row in rows] == [(0, "failed"), (1, "failed")]
    assert all(row["error"] for row in rows)


def test_kills_of_the_collector_with_operations_open(own_daemon: Daemon, start_job: Callable[[], Job]) -> None:
    """Its own daemon: its collector is killed."""
    job = start_job()
    ready(own_daemon, job)
    for _ in range(3):
        job.ranks.do("do 10 all_reduce 5 7", [0, 1])
        (pid,) = until(lambda: own_daemon.children().get("probing.daemon.collector"), what="the collector")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: is_replaced(own_daemon, pid), what="the next collector")
        job.ranks.do("do 10 all_reduce 5 7", [2])
    job.ranks.finish()
    world = next(made["comm"] for made in job.ranks.made() if made["name"] == "world")
    calls = [call for call in job.ranks.calls() if call.comm == world]
    check(job.wait_for_operations(own_daemon, len(calls), f"comm = '{world}'"), calls)


def test_processes_that_live_for_milliseconds_hold_up_nobody(
    daemon: Daemon, start_job: Callable[[], Job], doubles: Doubles, processes: list[subprocess.Popen[Any]]
) -> None:
    job = start_job()
    ready(daemon, job)
    # GIVEN a training process that forks others, which are gone before a reader comes
    parent = subprocess.Popen(
        [sys.executable, JOBS / "short_lives.py", doubles.nccl],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(doubles.folder)},
    )
    processes.append(parent)
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    sql = f"SELECT job FROM process.processes WHERE pid={parent.pid}"
    (known,) = until(lambda: daemon.rows(sql), what="the parent")
    # WHEN it forks 23 of them, while a job goes on
    parent.stdin.write("23\n")
    parent.stdin.flush()
    job.ranks.do("do 101 all_reduce 1009 7")
    job.ranks.do("drain")
    children = json.loads(parent.stdout.readline())
    # THEN the first query has all rows of the job, without a warning
    where = f"job = '{job.name}' AND count = 1009"
    done = daemon.ctl("-f", "json", "--strict", "query", f"SELECT count(*) AS n FROM comm.ops WHERE {where}")
    assert (json.loads(done.stdout), done.stderr) == ([{"n": 101 * SIZE}], "")
    # AND each child has its row, in the job of its parent, and nothing stays in flight
    sql = f"SELECT pid, job, rank, count FROM comm.ops WHERE pid IN ({', '.join(map(str, children))}) ORDER BY pid"
    rows = until(lambda: len(found := daemon.rows(sql)) == 23 and found, what="rows of all children")
    assert rows == [{"pid": pid, "job": known["job"], "rank": None, "count": 23} for pid in sorted(children)]
    assert daemon.rows(f"SELECT pid FROM comm.inflight WHERE pid IN ({', '.join(map(str, children))})") == []
    assert daemon.rows("SELECT count FROM probing.losses WHERE table_name = 'comm.ops' AND stage = 'ring'") == []
