"""What of the daemon stands still is replaced, with its stacks in the log, and no row is lost by it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from double_jobs import Job, check, ready
from e2e_support import Daemon, remove
from long import long, long_unless
from process_tree import arguments, family
from waiting import until

HANG_S = "3"
PLANTING = str(Path(__file__).with_name("deadlocking.py"))
MODULES = {"collector": "probing.daemon.collector", "service": "probing.daemon.service"}


def shown(daemon: Daemon, kind: str) -> bool:
    """Whether the log has the stacks of a process of ``kind`` that stood still, and the status says why it is young."""
    log = daemon.log.read_text()
    # The other threads go on while their stacks are written, which may end the process with SIGSEGV.
    reason = f"the {kind} was started again: killed by signal (6|11): it stood still"
    status = daemon.ctl("-f", "json", "status", check=None).stdout
    written = f"{kind}, pid " in log and "gave no sign of life" in log and "Thread 0x" in log
    return written and re.search(reason, status) is not None


def finish(daemon: Daemon, job: Job) -> None:
    """End the job; each of its operations has one row."""
    job.ranks.do("do 10 all_reduce 5 7")
    job.ranks.finish()
    world = next(made["comm"] for made in job.ranks.made() if made["name"] == "world")
    calls = [call for call in job.ranks.calls() if call.comm == world]
    check(job.wait_for_operations(daemon, len(calls), f"comm = '{world}'"), calls)


@pytest.mark.parametrize("kind", [long_unless(kind == "collector", kind) for kind in MODULES])
def test_a_stopped_process_is_replaced(
    make_daemon: Callable[..., Daemon], start_job: Callable[[], Job], kind: str
) -> None:
    daemon = make_daemon("n1", "--hang-s", HANG_S).start()
    job = start_job()
    ready(daemon, job)
    (pid,) = daemon.children()[MODULES[kind]]
    os.kill(pid, signal.SIGSTOP)
    job.ranks.do("do 10 all_reduce 5 7")
    until(lambda: daemon.children().get(MODULES[kind], [pid]) != [pid], what="another in its place")
    until(lambda: shown(daemon, kind), what=lambda: f"stacks and a reason: {daemon.tail()}")
    finish(daemon, job)


class Planted(Daemon):
    """A daemon with a process that can be made to wait for itself."""

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-I", PLANTING, *super().argv[2:]]

    def child(self, kind: str) -> int | None:
        assert self.process is not None
        pids = family(self.process.pid)
        return next((pid for pid in pids if arguments(pid)[2:4] == [PLANTING, kind]), None)

    def plant(self, kind: str) -> None:
        (self.state / f"{kind}.deadlock").touch()


@long
@pytest.mark.parametrize("kind", MODULES)
def test_a_deadlocked_process_is_replaced(base: Path, start_job: Callable[[], Job], kind: str) -> None:
    daemon = Planted(base, "n1", "--hang-s", HANG_S)
    try:
        daemon.start()
        job = start_job()
        ready(daemon, job)
        pid = daemon.child(kind)
        daemon.plant(kind)
        job.ranks.do("do 10 all_reduce 5 7")
        until(lambda: daemon.child(kind) not in (None, pid), what="another in its place")
        until(lambda: shown(daemon, kind), what=lambda: f"stacks and a reason: {daemon.tail()}")
        assert "in _deadlock" in daemon.log.read_text()
        finish(daemon, job)
    finally:
        remove(daemon)
