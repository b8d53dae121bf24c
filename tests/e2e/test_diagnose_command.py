"""What the commands around a diagnosis show of a real job that trains."""

from __future__ import annotations

from typing import Any

from e2e_support import Daemon
from waiting import until

PARTS = ("compute", "communication", "wait", "io")


def whole(rank: dict[str, Any]) -> bool:
    """Whether the shares of a rank make one: each is known once there are steps and samples."""
    return 0.999 < sum(rank[name] or 0 for name in PARTS) < 1.001


def test_the_shares_of_a_job_that_trains(daemon: Daemon, stepping: str) -> None:
    def balance() -> list[dict[str, Any]]:
        return [rank for job in daemon.json("balance") if job["job"] == stepping for rank in job["ranks"]]

    until(lambda: [rank["rank"] for rank in balance() if whole(rank)] == [0, 1], what=lambda: str(balance()))
    for rank in balance():
        assert all(rank[name] is None or 0 <= rank[name] <= 1 for name in PARTS)
    shown = daemon.ctl("diagnose", "--job", stepping).stdout
    assert shown.startswith(f"job {stepping}: nothing is wrong: 2 ranks, step ")
