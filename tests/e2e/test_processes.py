"""Who trains: `ps` on real torchrun jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import JOBS, Daemon
from long import long
from ports import free_port
from waiting import until

Launch = Callable[..., Any]


def rows_of(daemon: Daemon, *ports: int) -> list[dict[str, Any]]:
    """What `ps` says of our jobs: others may train on this machine too."""
    jobs = {f"n1/127.0.0.1:{port}" for port in ports}
    return [row for row in daemon.json("ps") if row["job"] in jobs and row["state"] != "exited"]


def trainers(daemon: Daemon, *ports: int) -> list[dict[str, Any]]:
    return [row for row in rows_of(daemon, *ports) if row["role"] == "trainer"]


@long
def test_job_first_daemon_second(make_daemon: Callable[..., Daemon], torchrun: Launch, tmp_path: Any) -> None:
    # GIVEN a job that trains already
    port = free_port()
    job = torchrun("--steps", "1000000", "--delay-ms", "5", port=port)
    until(lambda: "step" in (tmp_path / "job.log").read_text(), what="the first step")
    # WHEN the daemon comes second
    daemon = make_daemon().start()
    # THEN ps is complete within 3 s
    rows = until(
        lambda: (
            (found := trainers(daemon, port))
            and len(found) == 2
            and all("gloo" in r["backends"] for r in found)
            and found
        ),
        seconds=3,
        what="two trainers that use gloo",
    )
    assert sorted(r["rank"] for r in rows) == [0, 1]
    assert sorted(r["local_rank"] for r in rows) == [0, 1]
    assert {r["world_size"] for r in rows} == {2}
    assert {r["job"] for r in rows} == {f"n1/127.0.0.1:{port}"}
    assert len({r["run"] for r in rows}) == 1
    assert rows[0]["run"]
    assert {r["state"] for r in rows} <= {"running", "sleeping"}
    assert len({r["pid"] for r in rows}) == 2
    launchers = [r for r in rows_of(daemon, port) if r["role"] == "launcher"]
    assert [r["pid"] for r in launchers] == [job.pid]
    assert launchers[0]["rank"] is None
    assert len(rows_of(daemon, port)) == 3


@long
def test_equal_jobs_stay_apart(daemon: Daemon, torchrun: Launch) -> None:
    # Two at once, and then one of them again on the same port.
    first, second = free_port(), free_port()
    jobs = [torchrun("--steps", "1000000", "--delay-ms", "20", port=p) for p in (first, second)]
    rows = until(lambda: (found := trainers(daemon, first, second)) and len(found) == 4 and found, what="four trainers")
    groups = {(r["job"], r["run"]) for r in rows}
    assert len(groups) == 2
    assert all(sorted(r["rank"] for r in rows if (r["job"], r["run"]) == g) == [0, 1] for g in groups)

    def runs() -> set[tuple[str, str]]:
        sql = f"SELECT DISTINCT job, run FROM comm.ops WHERE job LIKE '%:{first}'"
        return {(r["job"], r["run"]) for r in daemon.rows(sql)}

    until(runs, what="operations of the first run")
    jobs[0].terminate()
    jobs[0].wait()
    torchrun("--steps", "1000000", "--delay-ms", "20", port=first)
    again = until(
        lambda: (
            (found := [r for r in trainers(daemon, first) if (r["job"], r["run"]) not in groups])
            and len(found) == 2
            and found
        ),
        what="the same job again",
    )
    assert len({(r["job"], r["run"]) for r in again}) == 1

    until(lambda: len(runs()) == 2, what="operations of both runs")


@long
def test_exit_is_an_event(daemon: Daemon, torchrun: Launch, tmp_path: Path) -> None:
    port = free_port()
    job = torchrun("--steps", "7", port=port)
    # Torch can abort in a rank at exit; the launcher then ends the other one.
    aborted = job.wait(60) != 0
    assert aborted == ("terminate called" in (tmp_path / "job.log").read_text())
    of_ranks = f"event = 'exit' AND role = 'trainer' AND job = 'n1/127.0.0.1:{port}'"
    events = until(
        lambda: (
            (found := daemon.rows(f"SELECT rank, exit_code, signal FROM process.events WHERE {of_ranks}"))
            and len(found) == 2
            and found
        ),
        what="both ranks' exits",
    )
    assert sorted(e["rank"] for e in events) == [0, 1]
    ends = {(e["exit_code"], e["signal"]) for e in events}
    assert ends == {(0, None)} if not aborted else (None, signal.SIGABRT) in ends


def test_ranks_of_mp_spawn_are_known_from_their_first_collective(
    daemon: Daemon, run_job: Callable[..., subprocess.Popen[Any]], tmp_path: Path
) -> None:
    # GIVEN ranks that no environment names; one of them keeps the others waiting in their first collective
    late = tmp_path / "late"
    job = run_job(sys.executable, JOBS / "spawned.py", free_port(), late, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    lines = [job.stdout.readline().split() for _ in range(3)]
    wanted = {int(rank): int(pid) for rank, pid in lines}

    def known() -> dict[int, int]:
        rows = daemon.rows(f"SELECT rank, pid FROM process.processes WHERE world_size = 3 AND job = 'pid:{job.pid}'")
        return {row["rank"]: row["pid"] for row in rows}

    # THEN each is known, also the one that has called nothing yet
    until(lambda: known() == wanted, what="the ranks of all three")
    # AND so are their operations when they go on
    late.touch()
    sql = f"SELECT DISTINCT rank, pid FROM comm.ops WHERE job = 'pid:{job.pid}' AND rank IS NOT NULL"
    until(lambda: {row["rank"]: row["pid"] for row in daemon.rows(sql)} == wanted, what="operations of all three")
