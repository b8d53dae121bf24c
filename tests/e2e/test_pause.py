"""All probes off at once, of the test's own daemon: by `probingctl pause` or by a file, with a row for the gap."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import EXAMPLE, Daemon
from ports import free_port
from waiting import until


def operations(daemon: Daemon, port: int) -> int:
    (row,) = daemon.rows(f"SELECT count(*) AS n FROM comm.ops WHERE job LIKE '%:{port}' AND state = 'done'")
    return int(row["n"])


def grows(daemon: Daemon, port: int) -> bool:
    before = operations(daemon, port)
    until(lambda: operations(daemon, port) > before, what="more operations")
    return True


def test_pause_and_resume(own_daemon: Daemon, ranks_job: Callable[..., Any], tmp_path: Path) -> None:
    port = free_port()
    ranks_job(EXAMPLE, "--steps", "1000000", "--delay-ms", "10", "--report-every", "5", port=port)
    until(lambda: operations(own_daemon, port), what="operations")
    log = tmp_path / "job.log"

    def steps() -> int:
        return log.read_text().count("step ")

    def stands_still() -> bool:
        """No operation is seen while the job makes dozens of them."""
        count, begin = operations(own_daemon, port), steps()
        until(lambda: steps() >= begin + 5, what="the job to go on")
        return operations(own_daemon, port) == count

    own_daemon.ctl("pause")
    assert own_daemon.json("status")["state"] == "paused"
    assert stands_still()
    assert "PAUSED on n1 since " in " ".join(own_daemon.ctl("diagnose", check=None).stdout.split())
    # A restart of the collector keeps it.
    (pid,) = own_daemon.children()["probing.daemon.collector"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: own_daemon.children().get("probing.daemon.collector", [pid]) != [pid], what="the next collector")
    until(lambda: own_daemon.ctl("-f", "json", "status", check=None).stdout.find('"paused"') > 0, what="its answer")
    assert stands_still()
    own_daemon.ctl("pause", "--resume")
    assert grows(own_daemon, port)
    gap = "SELECT 1 AS one FROM probing.losses WHERE reason = 'all probes were paused' AND table_name = 'comm.ops'"
    until(lambda: own_daemon.rows(gap), what="the gap as a row")

    switch = Path(f"{own_daemon.socket}.d") / "pause"
    switch.touch()
    until(lambda: own_daemon.json("status")["state"] == "paused", what="the pause")
    assert stands_still()
    switch.unlink()
    until(lambda: own_daemon.json("status")["state"] == "running", what="the end of the pause")
    assert grows(own_daemon, port)
