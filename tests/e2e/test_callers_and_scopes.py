"""A caller gets what its scope says: limits that delete, and tokens that no stranger is shown."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from client_in_process import probingctl
from e2e_support import Daemon
from ports import free_port
from stranger import Impostor, bind_attempts
from waiting import until

PROBE, ADMIN = "probe-0123456789abcdef", "admin-0123456789abcdef"
TOKENS = f"""
[[token]]
name = "oncall"
scope = "probe"
value = "{PROBE}"
[[token]]
name = "site"
scope = "admin"
value = "{ADMIN}"
"""
KEY = "store.keep_free_bytes"
# More than any disk has: no segment would stay.
EVERYTHING = f"{KEY}={1 << 60}"
GRACE_S = 5
_SERVICE = "probing.daemon.service"


class Caller:
    """Asks a daemon over TCP with one of its tokens."""

    def __init__(self, daemon: Daemon, port: int, base: Path, token: str) -> None:
        self._file = base / f"{token}.mine"
        self._file.write_text(token)
        self._target = f"127.0.0.1:{port}"

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return probingctl("-t", self._target, "--token-file", str(self._file), *words)


def listening(make_daemon: Callable[..., Daemon], base: Path, port: int, *more: str) -> Daemon:
    tokens = base / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    shutil.chown(tokens, "probing-service")
    return make_daemon("n1", "--listen", f"127.0.0.1:{port}", "--token-file", str(tokens), *more)


def test_a_limit_deletes_only_by_admin_confirmed_and_after_its_grace(
    make_daemon: Callable[..., Daemon], run_job: Callable[..., subprocess.Popen[Any]], base: Path
) -> None:
    """Of its own: its rows are deleted."""
    port = free_port()
    limits = ("--store.part-bytes", "65536", "--store.grace-s", str(GRACE_S), "--host.cpu-interval-s", "0.1")
    daemon = listening(make_daemon, base, port, *limits).start()
    # A process whose threads fill the log with rows, although they rest most of the time.
    code = (
        "import threading, time\ndef work():\n    while not time.sleep(0.005): sum(range(10_000))\n"
        "for _ in range(7): threading.Thread(target=work).start()"
    )
    run_job(
        sys.executable,
        "-c",
        code,
        env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29997"},
    )
    probe, admin = (Caller(daemon, port, base, token) for token in (PROBE, ADMIN))

    def oldest() -> str:
        """Returns the first time of the stored rows; the year 9999 where no segment is left."""
        (row,) = daemon.rows("SELECT min(oldest) AS ts FROM probing.store WHERE kind = 'segments'")
        return str(row["ts"] or "9999")

    def segment() -> str:
        return "" if oldest() == "9999" else oldest()

    def waiting() -> str | None:
        (setting,) = daemon.json("config", KEY)
        return str(setting["deletes_from"]) if setting["deletes_from"] else None

    first = until(segment, 150, what="a segment")
    # WHEN the scope probe would change it THEN it may not
    refused = probe.ctl("config", EVERYTHING, "--yes")
    assert (refused.returncode, "the scope admin is needed" in refused.stderr) == (1, True)
    assert probe.ctl("config", "sampling.hz=7").returncode == 0
    # WHEN it is not confirmed THEN its effect is said, and nothing changes
    unconfirmed = admin.ctl("config", EVERYTHING)
    assert unconfirmed.returncode == 2
    assert " would delete " in unconfirmed.stderr
    assert waiting() is None
    # WHEN it is set back in time THEN no row goes
    assert admin.ctl("config", EVERYTHING, "--yes").returncode == 0
    begins = datetime.fromisoformat(str(waiting())[:19] + "+00:00").timestamp()
    assert admin.ctl("config", KEY, "--reset").returncode == 0
    assert waiting() is None
    until(lambda: time.time() > begins + 2, what="the end of the grace")
    # Old messages of the kernel may come later.
    assert oldest() <= first
    # WHEN it is kept THEN rows go after the grace, also over a restart
    assert admin.ctl("config", EVERYTHING, "--yes", "--persist").returncode == 0
    (collector,) = daemon.children()["probing.daemon.collector"]
    os.kill(collector, signal.SIGKILL)
    until(lambda: daemon.ctl("config", KEY, check=None).returncode == 0 and waiting(), what="the next collector")
    assert oldest() <= first
    until(lambda: oldest() > first, what="rows that go")
    assert waiting() is None
    # What the limit left alone goes on.
    assert admin.ctl("config", KEY, "--reset").returncode == 0
    until(lambda: daemon.json("status")["state"] == "running", what="the daemon to store again")


def test_no_stranger_is_shown_a_token_over_restarts(make_daemon: Callable[..., Daemon], base: Path) -> None:
    """Of its own: its service is killed, and it is stopped."""
    port = free_port()
    daemon = listening(make_daemon, base, port).start()
    caller = Caller(daemon, port, base, PROBE)
    assert caller.ctl("status").returncode == 0
    # WHEN the service restarts THEN nobody takes its port, and the next one answers there
    for number in (signal.SIGKILL, signal.SIGHUP):
        (before,) = daemon.children()[_SERVICE]
        assert daemon.process is not None
        os.kill(before if number == signal.SIGKILL else daemon.process.pid, number)
        taken = []
        while daemon.children().get(_SERVICE, [before]) == [before]:
            taken += bind_attempts(port)
        assert taken == bind_attempts(port) == []
        until(lambda: caller.ctl("status").returncode == 0, what="the next service")
    # WHEN the daemon is stopped and a stranger listens THEN it is shown nothing
    daemon.stop(signal.SIGUSR1)
    with Impostor(f"127.0.0.1:{port}") as stranger:
        refused = caller.ctl("status")
        assert refused.returncode == 1
        assert "is not probingd's: the user nobody" in refused.stderr
        assert stranger.end() == []
    daemon.start()
    assert caller.ctl("status").returncode == 0
