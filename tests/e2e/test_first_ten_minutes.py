"""The page for beginners: each of its commands answers as the page shows."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from e2e_support import Daemon
from long import long
from pages import shape, shown_commands
from ports import free_port
from waiting import until


@long
def test_each_command_of_the_page_answers(make_daemon: Callable[..., Daemon], torchrun: Callable[..., Any]) -> None:
    daemon, port = make_daemon("gpu07").start(), free_port()
    torchrun("--steps", "1000000", "--delay-ms", "20", port=port)
    ranks = "SELECT pid FROM process.processes WHERE role = 'trainer' AND rank = 1"
    pid = until(lambda: daemon.rows(ranks), what="rank 1")[0]["pid"]
    asked = 0
    for _, words, below in shown_commands("first-ten-minutes.md"):
        if words[:2] == ["kill", "-STOP"]:
            os.kill(pid, signal.SIGSTOP)
        elif words[:2] == ["kill", "-CONT"]:
            # The client may find it before the daemon does.
            until(lambda: daemon.rows("SELECT 1 FROM diagnosis.findings"), what="the finding of the daemon")
            os.kill(pid, signal.SIGCONT)
        elif words[0] == "probingctl":
            options = [str(port) if word == "29500" else word for word in words[1:]]
            until(partial(answers, daemon, options, below), what=f"{shlex.join(words)} to begin with: {below}")
            asked += 1
    assert asked > 10


def answers(daemon: Daemon, options: list[str], below: str) -> bool:
    """Whether the command succeeds, or finds a fault, and its output begins as the page shows."""
    done = daemon.ctl(*options, check=None)
    return done.returncode in (0, 3) and shape(done.stdout.partition("\n")[0]) == shape(below)
