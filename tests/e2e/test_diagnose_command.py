"""What the commands around a diagnosis show of a real job that trains."""

from __future__ import annotations

from typing import Any

from e2e_support import Daemon
from waiting import until


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
