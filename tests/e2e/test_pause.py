"""All probes off at once: by `probingctl pause` or by a file, with a row for the gap."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e_support import Daemon, free_port, wait_for


def operations(daemon: Daemon, port: int) -> int:
    count: int = daemon.query(f"SELECT count(*) AS n FROM comm.ops WHERE job LIKE '%:{port}' AND state = 'done'")[0][
        "n"
    ]
    return count


def grows(daemon: Daemon, port: int) -> bool:
    before = operations(daemon, port)
    wait_for("more operations", lambda: operations(daemon, port) > before)
    return True


def test_pause_and_resume(daemon: Daemon, torchrun: Callable[..., Any], tmp_path: Path) -> None:
    port = free_port()
    torchrun("--steps", "1000000", "--delay-ms", "2", "--report-every", "10", port=port)
    wait_for("operations", lambda: operations(daemon, port))
    log = tmp_path / "torchrun.log"

    def steps() -> int:
        return log.read_text().count("step ")

    def stands_still() -> bool:
        """No operation is seen while the job makes some hundred of them."""
        count, begin = operations(daemon, port), steps()
        wait_for("the job to go on", lambda: steps() >= begin + 5)
        return operations(daemon, port) == count

    daemon.ctl("pause")
    assert daemon.json("status")["state"] == "paused"
    assert stands_still()
    # A restart of the collector keeps it.
    (pid,) = daemon.children()["probing.daemon.collector"]
    os.kill(pid, signal.SIGKILL)
    wait_for("the next collector", lambda: daemon.children().get("probing.daemon.collector", [pid]) != [pid])
    wait_for("its answer", lambda: daemon.ctl("-f", "json", "status", check=None).stdout.find('"paused"') > 0)
    assert stands_still()
    daemon.ctl("pause", "--resume")
    assert grows(daemon, port)
    gap = "SELECT 1 AS one FROM probing.losses WHERE reason = 'all probes were paused' AND table_name = 'comm.ops'"
    wait_for("the gap as a row", lambda: daemon.query(gap))

    switch = Path(f"{daemon.socket}.d") / "pause"
    switch.touch()
    wait_for("the pause", lambda: daemon.json("status")["state"] == "paused")
    assert stands_still()
    switch.unlink()
    wait_for("the end of the pause", lambda: daemon.json("status")["state"] == "running")
    assert grows(daemon, port)
