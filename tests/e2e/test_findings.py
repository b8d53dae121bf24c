"""Findings of the daemon by itself: opened, stored, kept over restarts, closed; hooks fire once."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, kill_family
from long import long
from ports import free_port
from waiting import until

_SERVICE = "probing.daemon.service"
TorchRun = Callable[..., subprocess.Popen[Any]]


@pytest.fixture
def port() -> int:
    """The port of the job, which names it: others may run on this machine."""
    return free_port()


@pytest.fixture
def stalling(ranks_job: TorchRun, tmp_path: Path, port: int) -> Callable[[], tuple[subprocess.Popen[Any], Path]]:
    """Starts a job whose last rank sleeps for ever once the returned file is there."""
    gate = tmp_path / "go"
    return lambda: (ranks_job(JOBS / "stops.py", 100, "sleep", gate, port=port), gate)


def hook_into(base: Path) -> tuple[str, Path]:
    """A command that the daemon's user may start, and the folder into which it writes each finding."""
    folder = base / "hooked"
    folder.mkdir()
    folder.chmod(0o777)
    command = base / "hook.sh"
    command.write_text(f"#!/bin/sh\ncat >{folder}/$PROBING_FINDING_ID.$$\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH | stat.S_IROTH)
    return str(command), folder


def rows(daemon: Daemon, port: int, state: str = "") -> list[dict[str, Any]]:
    found = daemon.rows(f"SELECT * FROM diagnosis.findings WHERE job LIKE '%:{port}' ORDER BY ts")
    return [row for row in found if state in ("", row["state"])]


def opened(daemon: Daemon, port: int) -> dict[str, Any]:
    return until(lambda: rows(daemon, port, "open"), what=lambda: f"a finding: {daemon.ctl('status').stdout}")[0]


def timeless(text: str) -> str:
    """``text`` without lengths of time, which grow from one command to the next."""
    return re.sub(r" for \d+(\.\d)? (s|min|h)\b", " for a time", text)


def check_commands(daemon: Daemon, port: int, facts: Path) -> dict[str, Any]:
    """Each command shows the hang; returns the answer of ``diagnose``."""
    job = ("--job", str(port))
    line = until(
        lambda: [line for line in daemon.ctl("ps").stdout.splitlines() if f":{port}: DIAGNOSIS at " in line],
        what="a line of ps",
        poll_s=0.5,
    )[0]
    said = timeless(line.partition("Z: ")[2])
    assert said.startswith("rank 1 (node n1, pid ")
    assert "stops.py" in said
    for command in (["nccl"], ["top", "--once"]):
        assert f"Z: {said}\n" in timeless(daemon.ctl(*command).stdout)
    page = daemon.ctl("diagnose", *job, "--save", str(facts), check=3).stdout
    assert page.startswith("Rank 1 (node n1, pid ")
    for part in ("Who:\n", "Evidence:\n", "Stack of rank 1 (culprit), main thread", "Confidence:\n", "Do next:\n"):
        assert part in page
    assert f"main ({JOBS}/stops.py:" in page
    # The facts alone say the same, without the daemon.
    assert daemon.ctl("-t", "unix:/nowhere", "diagnose", "--facts", str(facts), check=3).stdout == page
    answer: dict[str, Any] = json.loads(daemon.ctl("-f", "json", "why", *job, check=3).stdout)
    assert [culprit["rank"] for culprit in answer["culprits"]] == [1]
    assert answer["victims"] == [0]
    # The ranks are in order, though they hang.
    (order,) = daemon.json("ranks", "check", *job)
    assert (order["ranks"], order["world_size"], order["ok"]) == ([0, 1], 2, True)
    return answer


def check_history(daemon: Daemon, answer: dict[str, Any]) -> None:
    """The finding can be asked for after the job is gone."""
    job = answer["job"]
    until(lambda: not [row for row in daemon.json("ps") if row["job"] == job], what="the end of the job")
    rows = json.loads(daemon.ctl("-f", "json", "diagnose", "--history", "--job", job).stdout)
    (row,) = [row for row in rows if row["verdict"] == answer["verdict"]]
    assert [culprit["rank"] for culprit in row["culprits"]] == [1]
    assert {stack["role"] for stack in row["stacks"]} == {"culprit", "victim"}


def test_a_stall_is_named_once_shown_by_each_command_and_closed_with_the_job(
    make_daemon: Callable[..., Daemon],
    base: Path,
    tmp_path: Path,
    stalling: Callable[[], tuple[subprocess.Popen[Any], Path]],
    port: int,
) -> None:
    command, folder = hook_into(base)
    daemon = make_daemon("n1", "--diagnose.stall_s", "2", "--diagnose.hook", command).start()
    job, gate = stalling()
    own = f"job LIKE '%:{port}'"
    until(lambda: daemon.rows(f"SELECT * FROM comm.progress WHERE calls > 50 AND {own}"), what="operations")
    gate.touch()
    found = opened(daemon, port)
    assert (found["node"], found["ranks"], found["victims"]) == ("n1", "1", "0")
    assert found["severity"] == "error"
    # A machine that is busy may need a second look for them.
    until(
        lambda: any(stack["role"] == "culprit" for row in rows(daemon, port) for stack in json.loads(row["stacks"])),
        what="the stack of the rank",
    )
    hooks = until(
        lambda: [path for path in folder.glob(f"{found['finding_id']}.*") if path.stat().st_size],
        what=lambda: f"the hook: {daemon.tail()}",
    )
    assert json.loads(hooks[0].read_text())["sentence"] == found["sentence"]
    answer = check_commands(daemon, port, tmp_path / "facts.json")
    # A service that starts again knows the finding, and stores that it still holds.
    before = len(rows(daemon, port, "open"))
    (pid,) = daemon.children()[_SERVICE]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in daemon.children().get(_SERVICE, [pid]), what="the next service")
    until(lambda: daemon.ctl("status", check=None).returncode == 0, what=lambda: f"the service: {daemon.tail()}")
    until(lambda: len(rows(daemon, port, "open")) > before, what=lambda: f"the finding again: {daemon.tail()}")
    kill_family(job)
    closed = until(lambda: rows(daemon, port, "closed"), what="the end of the finding")[0]
    same = ("finding_id", "opened", "verdict", "ranks")
    assert {name: closed[name] for name in same} == {name: found[name] for name in same}
    assert {row["finding_id"] for row in rows(daemon, port)} == {found["finding_id"]}
    assert len(list(folder.glob(f"{found['finding_id']}.*"))) == 1
    check_history(daemon, answer)


@long
def test_a_daemon_that_comes_late_names_the_rank(
    make_daemon: Callable[..., Daemon],
    stalling: Callable[[], tuple[subprocess.Popen[Any], Path]],
    port: int,
    tmp_path: Path,
) -> None:
    stalling()[1].touch()
    log = tmp_path / "job.log"
    until(lambda: log.exists() and log.read_text().count("waits") == 2, what="ranks that wait")
    daemon = make_daemon("n1").start()
    found = opened(daemon, port)
    assert (found["ranks"], found["victims"]) == ("1", "0")


@long
def test_a_job_that_advances_and_ends_has_no_finding(
    make_daemon: Callable[..., Daemon], torchrun: TorchRun, port: int
) -> None:
    daemon = make_daemon("n1", "--diagnose.stall_s", "2", "--diagnose.review_s", "1").start()
    job = torchrun("--steps", "60", port=port)
    assert job.wait(120) == 0
    own = f"job LIKE '%:{port}'"
    until(lambda: daemon.rows(f"SELECT * FROM comm.progress WHERE ended IS NOT NULL AND {own}"), what="the end")
    assert rows(daemon, port) == []
    sources = daemon.json("status")["sources"]
    assert [source["state"] for source in sources if source["name"] == "diagnose"] == ["running"]
