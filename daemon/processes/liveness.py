"""Checks in /proc whether a process lives, and whose it is; none of these reads waits for the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import parse_stat, parse_status

__all__ = ("ProcessNow", "is_alive", "process_now", "real_user", "running_thread", "thread_exists")

_STATUS_BYTES = 64 << 10
_MAX_THREADS = 64


class ProcessNow(NamedTuple):
    """A process that lives."""

    pid: int
    start_ns: int


def process_now(pid: int) -> ProcessNow | None:
    """The process that has this pid; None for none or a kernel thread."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (OSError, ProbingError):
        return None
    return None if stat.kernel_thread else ProcessNow(pid, stat.start_ns)


def is_alive(pid: int, start_ns: int) -> bool:
    """Whether the process lives; True when that cannot be read. A zombie has ended."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ProbingError):
        return True
    # The main thread may have ended while other threads run.
    return stat.start_ns == start_ns and (stat.state not in "ZX" or stat.threads > 1)


def running_thread(pid: int) -> int | None:
    """Returns a thread of a process that has not ended, the main thread if that has not; None: all have ended."""
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            tids = sorted((int(entry.name) for entry in entries), key=lambda tid: (tid != pid, tid))
    except OSError:
        return None
    return next((tid for tid in tids[:_MAX_THREADS] if _runs(pid, tid)), None)


def thread_exists(pid: int, tid: int) -> bool:
    """Whether the process has the thread and the thread has not ended."""
    return Path(f"/proc/{pid}/task/{tid}").exists()


def _runs(pid: int, tid: int) -> bool:
    try:
        return parse_stat(Path(f"/proc/{pid}/task/{tid}/stat").read_bytes()).state not in "ZX"
    except (OSError, ProbingError):
        return False


def real_user(pid: int) -> int | None:
    """Returns the real user of a process. The owner of its files in /proc is not safe: a process chooses it."""
    try:
        with Path(f"/proc/{pid}/status").open("rb") as file:
            return parse_status(file.read(_STATUS_BYTES))["Uid"][0]
    except (OSError, ProbingError):
        return None
