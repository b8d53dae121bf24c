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


def launcher_log(row: dict, lines: int) -> list[str]:
    """Returns the first lines of a rank's log, once they are written."""
    return until(lambda: len(found := whole_lines(Path(row["log"]))) >= lines and found)[:lines]
