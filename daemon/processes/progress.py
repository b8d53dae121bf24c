"""Tells a slow reader from a blocked one: a process that waits for a CPU is only slow."""

from __future__ import annotations

import os
from pathlib import Path

from probing.api.errors import CorruptTarget
from probing.daemon.processes.procfs import parse_stat

__all__ = ("Progress",)

_MAX_STAT = 4096


class Progress:
    """Watches ``pid``, one of our readers, while it answers."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._before: int | None = None

    def none_since_last(self) -> bool:
        """Whether it is blocked and has not run since the last call."""
        ran = self._ran_if_blocked()
        stuck = ran is not None and ran == self._before
        self._before = ran
        return stuck

    def _ran_if_blocked(self) -> int | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat = parse_stat(os.read(fd, _MAX_STAT))
            finally:
                os.close(fd)
            switches = self._switches()
        except (OSError, CorruptTarget):
            return None
        return switches if stat.state in "DS" else None

    def _switches(self) -> int:
        # How often it was scheduled: finer than its CPU time, which counts in ticks.
        return int(self._path.with_name("schedstat").read_text().split()[2])
