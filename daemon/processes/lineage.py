"""Identifies processes that ended before they could be read: each inherits the job of the process that forked it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from probing.daemon.processes.registry import Process
from probing.daemon.source import Identity, ProcessKey

__all__ = ("Lineage",)

# The maximum number of entries that are kept, of about 200 bytes each. An entry is needed for seconds: the records of a
# process arrive soon after its fork.
MAX_FORKS = MAX_ENDED = 8192
# The maximum number of forks followed from child to parent. A process that becomes a daemon forks twice.
_MAX_DEPTH = 4


class Lineage:
    """Recent forks, and recent ends of processes that were never identified. Reading is thread-safe, without a lock.

    ``newest`` returns the last watched process with a pid.
    """

    def __init__(self, newest: Callable[[int], Process | None]) -> None:
        self._newest = newest
        self._forks: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._ended: OrderedDict[ProcessKey, None] = OrderedDict()

    def forked(self, pid: int, start_ns: int, ppid: int) -> None:
        _keep(self._forks, pid, (start_ns, ppid), MAX_FORKS)

    def replaced(self, pid: int) -> None:
        """Notes that a process called exec. It no longer inherits: its environment may differ from its parent's."""
        self._forks.pop(pid, None)

    def ended(self, key: ProcessKey) -> None:
        """Notes that a process ended without being identified."""
        _keep(self._ended, key, None, MAX_ENDED)

    def has_ended(self, key: ProcessKey) -> bool:
        return key in self._ended

    def inherited(self, key: ProcessKey) -> Identity | None:
        """Returns an identity for ``key`` with the job, run and owner of the watched process that forked it, and no
        rank; None if no watched process forked ``key``.
        """
        fork = self._forks.get(key[0])
        if fork is None or fork[0] != key[1]:
            return None
        for _ in range(_MAX_DEPTH):
            parent = self._newest(fork[1])
            if parent is not None and parent.facts.start_ns <= key[1]:
                who = parent.identity
                return Identity(*key, who.job, who.run, "other", owner=who.owner)
            fork = self._forks.get(fork[1])
            if fork is None:
                break
        return None


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
