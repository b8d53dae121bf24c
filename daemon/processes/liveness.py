"""Checks in /proc whether a process lives, and whose it is; none of these reads waits for the process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.procfs import parse_stat, parse_status

__all__ = ("ProcessNow", "is_alive", "process_now", "real_user")

_STATUS_BYTES = 64 << 10


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


def real_user(pid: int) -> int | None:
    """Returns the real user of a process. The owner of its files in /proc is not safe: a process chooses it."""
    try:
        with Path(f"/proc/{pid}/status").open("rb") as file:
            return parse_status(file.read(_STATUS_BYTES))["Uid"][0]
    except (OSError, ProbingError):
        return None
