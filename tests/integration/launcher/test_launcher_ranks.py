"""A launcher starts and ends the ranks of a group, which are real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from launcher_helpers import LauncherProcess, Owner, living
from waiting import until, whole_lines

from probing.groups.spec import environment

SLEEP = ("sleep", "1009")
PRINT_ENVIRONMENT = (
    sys.executable,
    "-c",
    "import json, os, time; print(json.dumps(dict(os.environ)), flush=True); time.sleep(1009)",
)


def test_ranks_get_the_environment_of_the_table(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *PRINT_ENVIRONMENT, env={"LINES": "a\nb=c\n", "EMPTY": ""}, master_port=2003)
    with LauncherProcess(directory, env={"OF_THE_LAUNCHER": "x"}) as launcher:
        rows = launcher.start(owner)
        ranks = owner.group.ranks()
        assert [row["rank"] for row in rows] == [0, 1, 2, 3, 4]
        for row, worker in zip(rows, ranks, strict=True):
            header, printed = launcher_log(row, 2)
            assert header.endswith(f" pid {row['pid']}: group {name}, generation 1, rank {row['rank']} ===")
            env = json.loads(printed)
            given = environment(owner.group.spec, ranks, worker, 1, 0)
            assert {key: env[key] for key in given} == given
            assert env["OF_THE_LAUNCHER"] == "x"
            assert set(env) - set(given) <= set(os.environ) | {"OF_THE_LAUNCHER"}
        launcher.stop(owner)
    assert living(name) == {}


def test_a_killed_rank_is_reported_and_the_others_run(directory: Path, name: str) -> None:
    owner = Owner(directory, name, *SLEEP)
    with LauncherProcess(directory) as launcher:
        rows = launcher.start(owner)
        os.kill(rows[3]["pid"], signal.SIGKILL)
        rows = launcher.until(lambda rows: rows[3]["state"] == "ended")
        assert rows[3]["signal"] == signal.SIGKILL
        assert rows[3]["exit_code"] is None
        assert rows[3]["reason"] == "ended by SIGKILL"
        assert [row["state"] for row in rows] == ["running"] * 3 + ["ended", "running"]
        assert {row["clear"] for row in launcher.stop(owner)} == {True}


def test_a_rank_inherits_no_files(directory: Path, name: str) -> None:
    show = "umask; readlink /proc/$$/fd/0 /proc/$$/fd/1; ls /proc/$$/fd; pwd"
    owner = Owner(directory, name, "sh", "-c", show, number=1, cwd=str(directory))
    with LauncherProcess(directory) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        [row] = launcher.until_states("ended")
        assert row["exit_code"] == 0
    mask = os.umask(0)
    os.umask(mask)
    lines = launcher_log(row, 8)[1:]
    assert lines == [f"{mask:04o}", "/dev/null", row["log"], "0", "1", "2", str(directory)]


def test_a_rank_inherits_no_signals_and_has_a_session_of_its_own(directory: Path, name: str) -> None:
    words = ("grep", "-E", "^(Sig(Blk|Ign)|NSsid|NSpgid):", "/proc/self/status")
    owner = Owner(directory, name, *words, number=1)
    before = ("env", "--ignore-signal=HUP,INT,USR2,CHLD", "--block-signal=TERM,USR1")
    with LauncherProcess(directory, before=before) as launcher:
        launcher.apply(owner.order("start"))
        launcher.apply(owner.run())
        [row] = launcher.until_states("ended")
        assert row["exit_code"] == 0
    assert launcher_log(row, 5)[1:] == [
        f"NSpgid:\t{row['pid']}",
        f"NSsid:\t{row['pid']}",
        "SigBlk:\t0000000000000000",
        # glibc's own, 32 and 33, which posix_spawn has ignored until glibc needs them.
        "SigIgn:\t0000000180000000",
    ]


def launcher_log(row: dict, lines: int) -> list[str]:
    """Returns the first lines of a rank's log, once they are written."""
    return until(lambda: len(found := whole_lines(Path(row["log"]))) >= lines and found)[:lines]
