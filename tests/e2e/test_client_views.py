"""What probingctl shows of a real job's Python: merged stacks, variables, settings, profiles."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from e2e_support import EXAMPLE, Daemon
from waiting import until


@pytest.fixture
def job(daemon: Daemon, training: str) -> str:
    """The job that trains, once both ranks do."""

    def trains() -> bool:
        return daemon.ctl("stacks", "--job", training, check=None).stdout.count("train (") == 2

    until(trains, what="both ranks in train()")
    return training


def test_both_ranks_are_one_tree(daemon: Daemon, job: str) -> None:
    def merged() -> dict[str, Any]:
        (tree,) = daemon.json("stacks", "--merge", "--job", job)
        return dict(tree)

    # A stack that changes while it is read has a frame without a name, and says that it is not complete.
    whole = until(lambda: (tree := merged())["children"][-1]["func"] != "?" and tree, what="stacks in one piece")
    assert (whole["job"], whole["thread"], whole["ranks"], whole["threads"]) == (job, "MainThread", [0, 1], 2)
    outermost = whole["children"][-1]
    assert (outermost["func"], outermost["file"]) == ("<module>", str(EXAMPLE))
    assert daemon.ctl("stacks", "--merge", "--job", job).stdout.startswith(f"job {job}  MainThread  ranks 0-1\n")


def test_variables_are_read_once_and_watched(daemon: Daemon, job: str) -> None:
    wanted = {(0, "step"), (1, "step"), (0, "arguments.steps"), (1, "arguments.steps")}

    def read() -> dict[tuple[int, str], dict[str, Any]] | None:
        # Before the first step a rank has no variable ``step``; the command fails if neither has a variable.
        answer = daemon.ctl("-f", "json", "vars", "--job", job, "step", "arguments.steps", check=None)
        rows = json.loads(answer.stdout) if answer.returncode == 0 else []
        values = {(row["rank"], row["name"]): row for row in rows if row["value"]}
        return values if values.keys() == wanted else None

    values = until(read, what="the first step")
    assert (values[0, "arguments.steps"]["value"], values[0, "step"]["type"]) == ("1000000", "int")
    # Not the step: for a while after that the steps of the job would not be known.
    daemon.ctl("vars", "--job", job, "loss", "--watch", "--interval", "200ms")

    def changes() -> bool:
        sql = f"SELECT DISTINCT number FROM python.variables WHERE job = '{job}' AND rank = 0 AND name = 'loss'"
        return len(daemon.json("query", sql)) >= 3

    until(changes, what="three values of loss")
    daemon.ctl("vars", "--job", job, "--unwatch")
    assert job not in [s["job"] for s in daemon.json("config", "variables.watch")]


def test_a_live_profile_names_what_the_job_does(daemon: Daemon, job: str, tmp_path: Path) -> None:
    folded = daemon.ctl("profile", "--job", job, "--seconds", "3", "-F", "folded").stdout
    assert ";train_step (examples/train_ddp.py)" in folded
    # The rate is again what it was.
    assert [(s["value"], s["job"]) for s in daemon.json("config", "sampling.hz")] == [("19", None)]
    rows = daemon.json("profile", "--job", job, "--wall", "--rank", "1")
    assert any(row["func"] == "train_step" and row["total_share"] > 0 for row in rows)
    assert sum(row["self_share"] for row in rows) == pytest.approx(1)
    assert daemon.json("profile", "--job", job, "--rank", "1", "--diff", "rank:0")
    graph = tmp_path / "graph.svg"
    daemon.ctl("flamegraph", "--job", job, "-o", str(graph))
    assert any((e.text or "").startswith("train_step (") for e in ET.parse(graph).iter())
    speedscope = json.loads(daemon.ctl("profile", "--job", job, "--by", "rank", "-F", "speedscope").stdout)
    assert sorted(p["name"] for p in speedscope["profiles"]) == ["rank 0", "rank 1"]
