"""What somebody on call sees of a real job that died, hung before the daemon came, or is paused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cgroup_support import memory_group
from e2e_support import JOBS, Daemon
from long import long, long_unless
from ports import free_port
from waiting import until

STEPS = 13


@pytest.fixture
def port() -> int:
    """The port of the job, which names it."""
    return free_port()


@pytest.fixture
def ranks(ranks_job: Callable[..., Any], port: int) -> Callable[..., Any]:
    """Two ranks; the second stops: ``ranks("kill")``, with the arguments of tests/jobs/stops.py."""
    return lambda *how: ranks_job(JOBS / "stops.py", STEPS, *how, port=port)


@pytest.mark.parametrize(
    ("how", "signal", "code", "words"),
    [("kill", 9, None, "killed by SIGKILL"), long_unless(False, "exit", None, 3, "exited with code 3")],
)
def test_who_died_first_and_how(
    daemon: Daemon,
    torchrun_job: Callable[..., Any],
    port: int,
    how: str,
    signal: int | None,
    code: int | None,
    words: str,
) -> None:
    torchrun_job(JOBS / "stops.py", STEPS, how, port=port).wait()
    job = f"n1/127.0.0.1:{port}"

    def ends() -> list[dict[str, Any]]:
        return [row for row in daemon.json("events", "--job", job) if row["event"] == "exit"]

    # A process that ends while it is being identified has its row a moment later than others.
    all_three = {(0, "trainer"), (1, "trainer"), (None, "launcher")}
    until(lambda: {(row["rank"], row["role"]) for row in ends()} == all_three, what=ends)
    exits = ends()
    assert all(row["signal"] is not None or row["exit_code"] is not None for row in exits)
    (first,) = [row for row in exits if row["first"]]
    assert (first["rank"], first["signal"], first["exit_code"]) == (1, signal, code)
    assert first["detail"] == f"{words}, first to fail"
    shown = daemon.ctl("ps", "--ended", "--job", job).stdout
    assert f"{words}, first to fail" in shown
    assert len(shown.splitlines()) == 1 + 3
    (failed,) = until(
        lambda: [own["first_failure"] for own in daemon.json("nccl", "--job", job) if own["first_failure"]]
    )
    assert (failed["rank"], failed["signal"]) == (1, signal)
    verb = "" if signal is None else "was "
    for command in (["nccl"], ["top", "--once"]):
        shown = daemon.ctl(*command, "--job", job).stdout
        assert f"FAILED FIRST: rank 1 (pid {first['pid']} on n1) {verb}{words} at " in shown
        assert "\n  ENDED " in shown


def test_a_kill_for_lack_of_memory_is_named(daemon: Daemon, ranks: Callable[..., Any], port: int) -> None:
    job = ("--job", f"n1/127.0.0.1:{port}")
    with memory_group(f"{daemon.instance}-{port}", 50 << 20) as group:
        ranks(group).wait()
        said = "killed by SIGKILL (OOM), first to fail"
        until(lambda: [r for r in daemon.json("ps", "--ended", *job) if r["how"] == said], what="the end of rank 1")
        (row,) = [row for row in daemon.json("ps", "--ended", *job) if row["first"]]
        assert (row["rank"], row["signal"], row["oom"]) == (1, 9, True)
        kinds = [row["event"] for row in daemon.json("events", *job) if row["rank"] == 1]
        assert kinds == ["start", "oom_kill", "exit"]
        until(lambda: not (group / "cgroup.procs").read_text(), what="an empty group")


def test_a_hang_from_before_the_daemon_is_named(
    make_daemon: Callable[..., Daemon], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    ranks("sleep")
    log = tmp_path / "job.log"
    until(lambda: log.read_text().count("waits") == 2, what="both ranks at the hang")
    daemon = make_daemon().start()
    rows = silent_ranks(daemon)
    assert (rows[0]["waits_in"], rows[0]["began_unseen"]) == ("gloo::allreduce", True)
    assert (rows[1]["waits_in"], rows[1]["python"].split()[0]) == (None, "main")
    assert rows[0]["unseen_why"] == rows[1]["unseen_why"] == "the process had the library before it was probed"
    for command in (["nccl"], ["top", "--once"]):
        shown = daemon.ctl(*command).stdout
        assert "rank 0: in gloo::allreduce (native stack; began before " in shown
        assert "ranks 0-1: operations before " in shown


@long
def test_a_hang_that_began_while_no_daemon_ran_is_named(
    make_daemon: Callable[..., Daemon], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = make_daemon().start()
    go_on = tmp_path / "go-on"
    ranks("sleep", go_on)
    seen = "SELECT count(*) AS n FROM comm.ops WHERE op = 'all_reduce' AND state = 'done'"
    until(lambda: daemon.rows(seen)[0]["n"] == 2 * STEPS, what="the operations before")
    daemon.stop()
    go_on.touch()
    log = tmp_path / "job.log"
    until(lambda: log.read_text().count("waits") == 2, what="both ranks at the hang")
    daemon.start()
    rows = silent_ranks(daemon)
    assert (rows[0]["waits_in"], rows[0]["began_unseen"]) == ("gloo::allreduce", True)
    assert (rows[1]["waits_in"], rows[1]["python"].split()[0]) == (None, "main")
    assert daemon.rows(seen)[0]["n"] == 2 * STEPS


def silent_ranks(daemon: Daemon) -> dict[int, dict[str, Any]]:
    """Both ranks of the job, once ``nccl`` shows them without an operation."""

    def found() -> dict[int, dict[str, Any]]:
        rows = {row["rank"]: row for own in daemon.json("nccl") for row in own["silent"]}
        return rows if len(rows) == 2 else {}

    rows: dict[int, dict[str, Any]] = until(found, what="both ranks")
    return rows


def test_a_pause_says_since_when_and_by_what(own_daemon: Daemon) -> None:
    """Its own daemon: all probes are paused."""
    own_daemon.ctl("pause")
    assert own_daemon.ctl("ps").stdout.startswith("PAUSED on n1 since ")
    assert " by `probingctl pause`: nothing newer is seen\n" in own_daemon.ctl("nccl").stdout
    own_daemon.ctl("pause", "--resume")
    assert not own_daemon.ctl("ps").stdout.startswith("PAUSED")
    switch = Path(f"{own_daemon.socket}.d") / "pause"
    switch.touch()
    until(lambda: f"by the file {switch}" in own_daemon.ctl("top", "--once").stdout, what="the pause")
