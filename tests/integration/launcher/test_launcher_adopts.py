"""A launcher that starts finds the ranks of the one before it, whatever happened to that one and to its state file."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
from launcher_helpers import LauncherProcess, Owner, living
from waiting import until

SLEEP = ("sleep", "1009")
NO_CHILD = "it ended while it was not a child of the launcher"


def test_ranks_survive_a_new_launcher_and_their_end_is_seen(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=3)
    with LauncherProcess(directory) as launcher:
        before = launcher.start(owner)
        launcher.kill()
    os.kill(before[0]["pid"], signal.SIGKILL)
    until(lambda: before[0]["pid"] not in living(name))
    with LauncherProcess(directory) as launcher:
        rows = launcher.until(lambda rows: rows[0]["state"] == "ended")
        assert [row["pid"] for row in rows] == [row["pid"] for row in before]
        assert [row["start_ns"] for row in rows] == [row["start_ns"] for row in before]
        assert [row["state"] for row in rows] == ["ended", "running", "running"]
        assert rows[0]["reason"] == NO_CHILD
        os.kill(before[1]["pid"], signal.SIGKILL)
        rows = launcher.until(lambda rows: rows[1]["state"] == "ended")
        assert rows[1]["reason"] == NO_CHILD
        assert [rows[1]["exit_code"], rows[1]["signal"]] == [None, None]
        launcher.stop(owner)


def test_children_stay_children_when_the_program_is_replaced(directory: Path, name: str) -> None:
    owner = Owner(directory, name, "sh", "-c", 'read x < "$CWD/$RANK"; exit 7', number=2, env={"CWD": str(directory)})
    for rank in range(2):
        os.mkfifo(directory / str(rank))
    with LauncherProcess(directory) as launcher:
        before = launcher.start(owner)
        launcher.reexec()
        assert [row["pid"] for row in launcher.until_states("running")] == [row["pid"] for row in before]
        (directory / "0").write_text("go\n")
        rows = launcher.until(lambda rows: rows[0]["state"] == "ended")
        assert (rows[0]["exit_code"], rows[0]["reason"]) == (7, "exited with 7")
        launcher.stop(owner)


def test_an_end_while_the_program_is_replaced_is_seen(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=5)
    with LauncherProcess(directory) as launcher:
        rows = launcher.start(owner)
        launcher.tell("reexec")
        for row in rows:
            os.kill(row["pid"], signal.SIGKILL)
        launcher.ready()
        rows = launcher.until_states("ended")
        assert [row["signal"] for row in rows] == [signal.SIGKILL] * 5
        launcher.stop(owner)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1009)"], {})
    print("daemon", pid, flush=True)
    open("go").read()
    os._exit(0)
os.wait()
time.sleep(1009)
"""


def test_a_daemon_without_environment_stays_known_when_the_program_is_replaced(directory: Path, name: str) -> None:
    os.mkfifo(directory / "go")
    owner = Owner(directory, f"{name}-a", sys.executable, "-S", "-c", DAEMON, number=1, cwd=str(directory))
    other = Owner(directory, f"{name}-b", *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        words = until(
            lambda: (text := Path(row["log"]).read_text()).count("daemon") and text.split("daemon ")[1].split()
        )
        daemon = psutil.Process(int(words[0]))
        until(lambda: not daemon.environ())
        # The launcher looks through all processes, while the daemon descends from the rank.
        launcher.apply(other.order("start"))
        launcher.apply(other.run())
        launcher.until_states("running")
        (directory / "go").write_text("go")
        until(lambda: daemon.ppid() == launcher.process.pid)
        # Two groups run, so that its parent does not say whose it is.
        launcher.reexec()
        launcher.until_states("running")
        launcher.apply(owner.order("stop"))
        launcher.until(
            lambda rows: {row["group"] for row in rows if row["clear"] and row["seen"] == 2} == {f"{name}-a"}
        )
        assert not daemon.is_running()
        launcher.apply(other.order("stop"))
        launcher.until(lambda rows: all(row["clear"] and row["seen"] == 2 for row in rows))


def test_a_process_that_got_the_pid_of_a_rank_is_left_alone(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        launcher.kill()
    path = directory / "state" / "launcher.json"
    state = json.loads(path.read_text())
    [run] = state["groups"][0]["runs"]
    os.kill(run["pid"], signal.SIGKILL)
    run["pid"] = os.getpid()
    path.write_text(json.dumps(state))
    with LauncherProcess(directory) as launcher:
        [row] = launcher.rows()
        assert (row["state"], row["reason"]) == ("ended", NO_CHILD)
        launcher.stop(owner)


def test_runs_of_an_earlier_boot_have_ended(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        launcher.kill()
    os.kill(row["pid"], signal.SIGKILL)
    path = directory / "state" / "launcher.json"
    state = json.loads(path.read_text())
    state["groups"][0]["runs"][0]["boot_id"] = "an older boot"
    path.write_text(json.dumps(state))
    with LauncherProcess(directory) as launcher:
        [row] = launcher.rows()
        assert (row["state"], row["reason"]) == ("ended", "the machine was started again")
        launcher.stop(owner)


def test_ranks_are_found_without_the_state_file(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=3)
    with LauncherProcess(directory) as launcher:
        before = launcher.start(owner)
        launcher.kill()
    os.kill(before[2]["pid"], signal.SIGKILL)
    (directory / "state" / "launcher.json").write_bytes(b"\0" * 4096)
    with LauncherProcess(directory) as launcher:
        assert launcher.problem.startswith("the state file was damaged")
        assert launcher.rows() == []
        assert launcher.apply(owner.group) == ""
        rows = launcher.until(lambda rows: [row["state"] for row in rows] == ["running", "running", "ended"])
        assert [row["pid"] for row in rows] == [before[0]["pid"], before[1]["pid"], None]
        assert rows[2]["reason"] == (
            "generation 1 was started before, without a record of this rank: no generation starts twice"
        )
        launcher.apply(owner.restart())
        launcher.until(lambda rows: all(row["clear"] for row in rows))
        assert living(name) == {}
        launcher.apply(owner.run())
        launcher.until_states("running")
        launcher.stop(owner)


def test_a_generation_whose_ranks_have_ended_does_not_start_again_without_the_state_file(
    directory: Path, name: str
) -> None:
    owner = Owner(directory, name, "true", number=2)
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        launcher.until_states("ended")
        launcher.kill()
    (directory / "state" / "launcher.json").write_bytes(b"{}}")
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.group)
        rows = launcher.until_states("ended")
        assert {row["pid"] for row in rows} == {None}
        assert (directory / "state" / "logs" / name / "rank0.log").read_text().count("===\n") == 1


def test_ranks_of_a_group_that_was_deleted_are_ended_by_the_next_launcher(directory: Path, name: str) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(1009)"
    code = f"import signal, time; {code}"
    owner = Owner(directory, name, sys.executable, "-S", "-c", code, number=1, grace_s=3600.0)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        until(lambda: "ready" in Path(row["log"]).read_text())
        launcher.apply(owner.order("delete"))
        launcher.until_states("ending")
        launcher.kill()
    with LauncherProcess(directory) as launcher:
        launcher.until_states("ending")
        assert len(living(name)) == 1
        launcher.ask("advance", seconds=3600)
        launcher.until(lambda rows: rows == [])
        assert living(name) == {}
        assert launcher.ask("clear", name=name, generation=2)
    [history] = json.loads((directory / "state" / "launcher.json").read_text())["groups"]
    assert (history["record"], history["runs"], history["generation"]) == ("", [], 2)


def test_a_group_whose_key_is_trusted_no_longer(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        launcher.apply(owner.order("restart"))
        launcher.until(lambda rows: rows[0]["clear"])
        launcher.apply(owner.run())
        launcher.until_states("running")
        (directory / "keys" / "launch.key").write_bytes(b"x" * 32)
    with LauncherProcess(directory) as launcher:
        assert launcher.until_states("running")
        assert launcher.apply(owner.group) == f"group {name} is signed by a key that root does not trust"
        for pid in living(name):
            os.kill(pid, signal.SIGKILL)
        launcher.until(lambda rows: [row["state"] for row in rows if row["generation"]] == ["ended"])


def test_a_second_launcher_is_told_which_is_the_first(directory: Path, name: str) -> None:
    with LauncherProcess(directory) as launcher:
        second = LauncherProcess(directory)
        assert second.process.wait(60) == 1
        second.process.stdin.close()
        second.process.stdout.close()
        assert launcher.rows() == []
