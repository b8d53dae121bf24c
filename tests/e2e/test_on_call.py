"""What somebody on call sees of a real job that died."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, wait_for

STEPS = 13


@pytest.fixture
def ranks(torchrun_job: Callable[..., Any]) -> Callable[..., Any]:
    """Two ranks, of which the second stops: ``ranks("kill")`` as tests/jobs/stops.py says."""
    return lambda how: torchrun_job(JOBS / "stops.py", STEPS, how)


@pytest.mark.parametrize(
    ("how", "signal", "code", "words"),
    [("kill", 9, None, "killed by SIGKILL"), ("exit", None, 3, "exited with code 3")],
)
def test_who_died_first_and_how(
    daemon: Daemon, ranks: Callable[..., Any], how: str, signal: int | None, code: int | None, words: str
) -> None:
    ranks(how).wait()
    job = wait_for("the end of the launcher", lambda: [
        row["job"] for row in daemon.json("events") if (row["event"], row["role"]) == ("exit", "launcher")
    ])[0]  # fmt: skip
    exits = [row for row in daemon.json("events", "--job", job) if row["event"] == "exit"]
    assert {(row["rank"], row["role"]) for row in exits} == {(0, "trainer"), (1, "trainer"), (None, "launcher")}
    assert all(row["signal"] is not None or row["exit_code"] is not None for row in exits)
    (first,) = [row for row in exits if row["first"]]
    assert (first["rank"], first["signal"], first["exit_code"]) == (1, signal, code)
    assert first["detail"] == f"{words}, first of the job to fail"
    shown = daemon.ctl("ps", "--ended").stdout
    assert f"{words}, first of the job to fail" in shown
    assert len(shown.splitlines()) == 1 + 3
