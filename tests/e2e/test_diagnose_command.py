"""What the commands around a diagnosis show of a real job: while it runs, while it hangs, and after it is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import JOBS, Daemon
from ports import free_port
from process_tree import family
from waiting import until

STEPS = 13


def test_a_hang_in_each_command_and_after_it_is_gone(
    make_daemon: Callable[..., Daemon], ranks_job: Callable[..., Any], tmp_path: Path
) -> None:
    daemon = make_daemon()
    daemon.config.write_text(f'instance = "{daemon.instance}"\n[diagnose]\nstall_s = 2\n')
    daemon.start()
    port = free_port()
    process = ranks_job(JOBS / "stops.py", STEPS, "sleep", port=port)
    job = ("--job", str(port))
    line = until(
        lambda: [line for line in daemon.ctl("ps").stdout.splitlines() if f":{port}: DIAGNOSIS at " in line],
        what="a line of ps",
        poll_s=0.5,
    )[0]
    said = line.partition("Z: ")[2]
    assert said.startswith("rank 1 (node n1, pid ")
    assert "stops.py" in said
    for command in (["nccl"], ["top", "--once"]):
        assert f"Z: {said}\n" in daemon.ctl(*command).stdout
    facts = tmp_path / "facts.json"
    page = daemon.ctl("diagnose", *job, "--save", str(facts), check=3).stdout
    assert page.startswith("Rank 1 (node n1, pid ")
    for part in ("Who:\n", "Evidence:\n", "Stack of rank 1 (culprit), main thread", "Confidence:\n", "Do next:\n"):
        assert part in page
    found = json.loads(daemon.ctl("-f", "json", "why", *job, check=3).stdout)
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["victims"] == [0]
    assert f"main ({JOBS}/stops.py:" in page
    # THEN the facts alone say the same, without the daemon
    assert daemon.ctl("-t", "unix:/nowhere", "diagnose", "--facts", str(facts), check=3).stdout == page
    # AND ranks are in order, though they hang
    (order,) = daemon.json("ranks", "check", *job)
    assert (order["ranks"], order["world_size"], order["ok"]) == ([0, 1], 2, True)
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not [row for row in daemon.json("ps") if row["job"] == found["job"]], what="the end of the job")
    rows = json.loads(daemon.ctl("-f", "json", "diagnose", "--history", "--job", found["job"]).stdout)
    (row,) = [row for row in rows if row["verdict"] == found["verdict"]]
    assert [culprit["rank"] for culprit in row["culprits"]] == [1]
    assert {stack["role"] for stack in row["stacks"]} == {"culprit", "victim"}


def test_the_shares_of_a_job_that_trains(daemon: Daemon, training: str) -> None:
    def balance() -> dict[str, Any] | None:
        """Returns the shares, once they are there for both ranks."""
        jobs = [own for own in daemon.json("balance") if own["job"] == training]
        return next((own for own in jobs if [rank["rank"] for rank in own["ranks"]] == [0, 1]), None)

    job = until(balance, what="steps of both ranks")
    for rank in job["ranks"]:
        parts = [rank[name] for name in ("compute", "communication", "wait", "io")]
        assert all(part is None or 0 <= part <= 1 for part in parts)
        assert 0.999 < sum(part or 0 for part in parts) < 1.001
    shown = daemon.ctl("diagnose", "--job", training).stdout
    assert shown.startswith(f"job {training}: nothing is wrong: 2 ranks, step ")
