"""A launcher ends all processes of a generation: those that ignore SIGTERM, daemons, stopped ones and zombies too."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from launcher_helpers import LauncherProcess, Owner, living
from waiting import until

SLEEP = ("sleep", "1009")
READY = "import os, signal, sys, time; print('ready', flush=True); "


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def said(row: dict, text: str = "ready") -> None:
    """Waits until a rank wrote ``text`` to its log."""
    until(lambda: text in Path(row["log"]).read_text(), what=lambda: Path(row["log"]).read_text())


def test_a_program_that_ends_cleanly_is_not_killed(directory: Path, name: str) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(7))); "
    owner = Owner(directory, name, *python(f"import os, signal, time; {code}{READY}time.sleep(1009)"), number=1)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        said(row)
        [row] = launcher.stop(owner)
    assert (row["state"], row["exit_code"], row["signal"]) == ("ended", 7, None)
    assert row["reason"] == "ended for generation 2; exited with 7"
    said(row, "saved")


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace_time(directory: Path, name: str) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}time.sleep(1009)"
    owner = Owner(directory, name, *python(code), number=2, grace_s=0.2)
    with LauncherProcess(directory) as launcher:
        for row in launcher.start(owner):
            said(row)
        rows = launcher.stop(owner)
    assert [row["signal"] for row in rows] == [signal.SIGKILL] * 2


def test_a_stopped_program_can_end_cleanly(directory: Path, name: str) -> None:
    code = f"import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); {READY}time.sleep(1009)"
    owner = Owner(directory, name, *python(code), number=1, grace_s=3600.0)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        said(row)
        os.kill(row["pid"], signal.SIGSTOP)
        [row] = launcher.stop(owner)
    assert (row["exit_code"], row["signal"]) == (7, None)


DAEMON = """
import os, sys, time
def daemon(clear):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            words = [sys.executable, "-S", "-c", "import time; time.sleep(1009)"]
            os.execve(sys.executable, words, {} if clear else os.environ)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_a_daemon_of_a_rank_is_ended(directory: Path, name: str, clear: bool, stays: bool) -> None:
    code = f"{DAEMON}\ndaemon({clear})\nprint('ready', flush=True)\n{'time.sleep(1009)' if stays else ''}"
    owner = Owner(directory, name, *python(code), number=1)
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        [row] = launcher.until_states("running" if stays else "ended")
        said(row)
        me = psutil.Process(launcher.process.pid)
        daemons = until(lambda: [child for child in me.children() if child.pid != row["pid"]])
        if not stays and not clear:
            [row] = launcher.until(lambda rows: rows[0]["left"])
            assert (row["left"], row["reason"]) == (1, "exited with 0; 1 process of it still runs")
        [row] = launcher.stop(owner)
        assert row["clear"]
        assert [daemon.is_running() for daemon in daemons] == [False]


def test_a_new_generation_waits_for_what_an_older_one_left(directory: Path, name: str) -> None:
    code = f"{DAEMON}\ndaemon(False)\n{READY}time.sleep(1009)"
    owner = Owner(directory, name, *python(code), number=2, grace_s=0.2)
    with LauncherProcess(directory) as launcher:
        for row in launcher.start(owner):
            said(row)
        for pid in living(name):
            if os.getsid(pid) != pid:
                os.kill(pid, signal.SIGSTOP)
        launcher.apply(owner.restart())
        launcher.apply(owner.run())
        launcher.until(lambda rows: {(row["state"], row["generation"]) for row in rows} == {("running", 2)})
        assert {generation for generation, _ in living(name).values()} == {2}
        launcher.stop(owner)


def test_zombies_are_reaped(directory: Path, name: str) -> None:
    child = "if os.fork() == 0:\n      print('orphan', os.getpid(), flush=True); os._exit(0)\n    os._exit(0)"
    code = f"import os, time\nfor _ in range(23):\n  if os.fork() == 0:\n    {child}\n  os.wait()\ntime.sleep(1009)"
    owner = Owner(directory, name, *python(code), number=1)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        until(lambda: Path(row["log"]).read_text().count("orphan") == 23)
        me = psutil.Process(launcher.process.pid)
        until(lambda: launcher.rows() and [child.pid for child in me.children()] == [row["pid"]])
        launcher.stop(owner)


def test_processes_of_another_group_are_left_alone(directory: Path, name: str) -> None:
    owner = Owner(directory, f"{name}-a", *SLEEP, number=2)
    other = Owner(directory, f"{name}-b", *SLEEP, number=2)
    with LauncherProcess(directory) as launcher:
        launcher.start(owner)
        launcher.start(other)
        assert len(living(f"{name}-a")) == len(living(f"{name}-b")) == 2
        launcher.apply(owner.order("stop"))
        launcher.until(lambda rows: [row["state"] for row in rows] == ["ended"] * 2 + ["running"] * 2)
        assert (len(living(f"{name}-a")), len(living(f"{name}-b"))) == (0, 2)
        launcher.apply(other.order("delete"))
        launcher.until(lambda rows: len(rows) == 2)
        assert living(f"{name}-b") == {}


def test_the_save_step_signals_each_rank_before_it_ends(directory: Path, name: str) -> None:
    code = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: (print('saved'), sys.exit(3))); {READY}"
    owner = Owner(directory, name, *python(f"{code}time.sleep(1009)"), number=2, save=("SIGUSR1",), save_s=3600.0)
    with LauncherProcess(directory) as launcher:
        for row in launcher.start(owner):
            said(row)
        launcher.apply(owner.restart())
        rows = launcher.until(lambda rows: all(row["clear"] for row in rows))
        for row in rows:
            said(row, "saved")
        # An order of the owner ends ranks without it.
        launcher.apply(owner.run())
        rows = launcher.until_states("running")
        assert {row["exit_code"] for row in launcher.stop(owner)} == {None}


def test_the_save_command_runs_once_with_the_environment_of_the_lowest_rank(directory: Path, name: str) -> None:
    save = ("sh", "-c", 'echo "saves $RANK of $WORLD_SIZE at $PROBING_GROUP: $PROBING_SAVE_PIDS"')
    owner = Owner(directory, name, *SLEEP, number=3, save=save, save_s=3600.0)
    with LauncherProcess(directory) as launcher:
        rows = launcher.start(owner)
        pids = sorted(row["pid"] for row in rows)
        launcher.apply(owner.restart())
        rows = launcher.until(lambda rows: all(row["clear"] for row in rows))
        text = f"saves 0 of 3 at {name}/1: {pids[0]} {pids[1]} {pids[2]}"
        assert [Path(row["log"]).read_text().count(text) for row in rows] == [1, 0, 0]


def test_the_owner_ends_a_save_step(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=1, save=("sh", "-c", "echo saves; sleep 1013"), save_s=3600.0)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        launcher.apply(owner.restart())
        said(row, "saves")
        [row] = launcher.rows()
        assert (row["state"], row["generation"], row["seen"]) == ("ending", 1, 2)
        launcher.stop(owner)
    assert living(name) == {}


def test_a_save_step_goes_on_under_a_new_launcher(directory: Path, name: str) -> None:
    code = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: print('saves', flush=True)); {READY}"
    code += f"open({str(directory / 'go')!r}).read(); sys.exit(3)"
    os.mkfifo(directory / "go")
    owner = Owner(directory, name, *python(code), number=1, save=("SIGUSR1",), save_s=3600.0)
    with LauncherProcess(directory) as launcher:
        [row] = launcher.start(owner)
        said(row)
        launcher.apply(owner.restart())
        said(row, "saves")
        launcher.reexec()
        [row] = launcher.until_states("ending")
        (directory / "go").write_text("go")
        launcher.until(lambda rows: rows[0]["clear"])
        assert Path(row["log"]).read_text().count("saves") == 1
        launcher.apply(owner.run())
        launcher.until_states("running")
        launcher.stop(owner)


def test_a_save_step_that_does_not_end_is_cut_off(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP, number=2, save=("sh", "-c", "echo saves; sleep 1013"), save_s=0.3)
    with LauncherProcess(directory) as launcher:
        [row, _] = launcher.start(owner)
        launcher.apply(owner.restart())
        launcher.until(lambda rows: all(row["clear"] for row in rows))
        said(row, "saves")
    assert living(name) == {}
