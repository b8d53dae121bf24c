"""Checks in /proc whether a process lives, who its user is, and whether it belongs to the daemon. No check waits for
the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import ProbingError
from probing.daemon.processes.owners import owner_of
from probing.daemon.processes.procfs import parse_cgroup, parse_stat, parse_status

__all__ = (
    "OwnProcesses",
    "ProcessNow",
    "is_alive",
    "owner_now",
    "process_now",
    "real_user",
    "running_thread",
    "thread_exists",
)

_STATUS_BYTES = 64 << 10
_MAX_THREADS = 64


class ProcessNow(NamedTuple):
    """A process that lives."""

    pid: int
    start_ns: int


def process_now(pid: int) -> ProcessNow | None:
    """Returns the process with this pid; None if no process has this pid, or a kernel thread has it."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (OSError, ProbingError):
        return None
    return None if stat.kernel_thread else ProcessNow(pid, stat.start_ns)


def is_alive(pid: int, start_ns: int) -> bool:
    """Returns whether the process lives; True when its state cannot be read. A zombie has ended."""
    try:
        stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ProbingError):
        return True
    # The main thread may have ended while other threads run.
    return stat.start_ns == start_ns and (stat.state not in "ZX" or stat.threads > 1)


def running_thread(pid: int) -> int | None:
    """Returns the tid of a thread that has not ended, preferably the main thread; None if all threads have ended."""
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            tids = sorted((int(entry.name) for entry in entries), key=lambda tid: (tid != pid, tid))
    except OSError:
        return None
    return next((tid for tid in tids[:_MAX_THREADS] if _runs(pid, tid)), None)


def thread_exists(pid: int, tid: int) -> bool:
    """Returns whether /proc lists the thread ``tid`` of the process."""
    return Path(f"/proc/{pid}/task/{tid}").exists()


def _runs(pid: int, tid: int) -> bool:
    try:
        return parse_stat(Path(f"/proc/{pid}/task/{tid}/stat").read_bytes()).state not in "ZX"
    except (OSError, ProbingError):
        return False


def real_user(pid: int) -> int | None:
    """Returns the real user of a process. The owner of its files in /proc is not reliable: a process can choose it."""
    try:
        with Path(f"/proc/{pid}/status").open("rb") as file:
            return parse_status(file.read(_STATUS_BYTES))["Uid"][0]
    except (OSError, ProbingError):
        return None


def owner_now(pid: int) -> int | None:
    """Returns the user to whom a process is charged where a limit is divided among users. For a process in a user
    namespace that root did not create, this is the user who created the namespace, because one user can have many uids
    inside it. Returns None for a process that has ended.
    """
    uid = real_user(pid)
    try:
        return None if uid is None else owner_of(lambda name: os.open(f"/proc/{pid}/{name}", os.O_RDONLY), uid, ())
    except (OSError, ProbingError):
        return uid


_SLICE = b"/probingd.slice/"
_MAX_BYTES = 64 << 10


class OwnProcesses:
    """The set of the pids of the daemon's processes. ``users``: the uids of these processes. Without uids, the set is
    empty.

    A uid is not enough: in a container the daemon's users may have the uids of other users of the host. So a process
    must also be in the same control groups as this process; all groups below probingd.slice count as the same.
    """

    def __init__(self, users: frozenset[int]) -> None:
        self._users = users
        self._groups = _groups("self")

    def __contains__(self, pid: object) -> bool:
        if not isinstance(pid, int) or not self._groups or real_user(pid) not in self._users:
            return False
        return _groups(str(pid)) == self._groups


def _groups(pid: str) -> frozenset[bytes]:
    try:
        paths = parse_cgroup(_read_cgroup(pid))
    except (OSError, ProbingError):
        return frozenset()
    return frozenset(_SLICE if _SLICE in path else path for path in paths)


def _read_cgroup(pid: str) -> bytes:
    with Path(f"/proc/{pid}/cgroup").open("rb") as file:
        return file.read(_MAX_BYTES)
