"""Recognizes the daemon's own processes, by user and control group."""

from __future__ import annotations

from pathlib import Path

from probing.api.errors import ProbingError
from probing.daemon.processes.liveness import real_user
from probing.daemon.processes.procfs import parse_cgroup

__all__ = ("OwnProcesses",)

_SLICE = b"/probingd.slice/"
_MAX_BYTES = 64 << 10


class OwnProcesses:
    """Whether a pid is in it. ``users``: the uids of the daemon's processes; none: nothing is its own.

    A uid is not enough: in a container the daemon's users may have the numbers of other users of the host. So its
    processes are also in the control group of this one, or with it in probingd.slice.
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
