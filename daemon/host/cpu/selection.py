"""Chooses the processes and threads to read each second: watched processes, their threads, and the busiest of the other
processes of the node.

A turn is a call of ``Selection.request``. To find the busiest processes, each turn also reads the CPU time of a slice
of all processes (a glance at each process of the slice). So the work of a turn is limited even if the node runs very
many processes, and a noisy neighbour is found after half a minute. A process that uses almost no CPU, such as a waiting
rank, is read less and less often, but at least every 8 turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from probing.daemon.ipc import Header
from probing.daemon.source import Identity

__all__ = ("LEAST_SHARE", "MAX_BUSY", "ROLES", "STILL_SHARE", "Selection", "Watched")

MAX_WATCHED = 1_024
MAX_WITH_THREADS = 256
MAX_OTHERS = 16
MAX_BUSY = 4
MAX_ACTIVE = 32
LEAST_GLANCES = 16
MAX_GLANCES = 128
LEAST_SHARE = 0.01
"""A thread, or a process that is not watched, counts as busy if it uses at least this share of a CPU."""
STILL_SHARE = 0.02
"""Below this share of a CPU a process counts as still. A single tick of 10 ms in a second is only half of this
share."""
ROLES = ("trainer", "data_loader", "launcher")
_LIST_TURNS = 30
_NEW_THREADS_TURNS = 5
_PIDS_TURNS = 10
# After 4, 5 and 6 readings in a row with almost no CPU time, a process is read only every 2, 4 and 8 turns.
_STILL = (4, 5, 6)
# In this many turns each process of the node gets one glance, if the node has fewer than 4,096 processes.
_ROUND_TURNS = 32
_Key = tuple[int, int]


@dataclass(slots=True)
class Watched:
    """A process and the tids of its threads. In each turn the ``busy`` threads are read closely, and the ``active``
    threads and some of the other ``tids`` are read.

    ``still``: the number of readings in a row with almost no CPU time.
    """

    who: Identity
    busy: list[int]
    active: list[int] = field(default_factory=list)
    tids: list[int] = field(default_factory=list)
    turned: int = 0
    listed: int = -_LIST_TURNS
    threads: int = 0
    still: int = 0

    def every(self) -> int:
        """Returns the number of turns from one reading of the process to the next: 1, 2, 4 or 8."""
        return 1 << sum(self.still >= readings for readings in _STILL)

    def rest(self) -> list[int]:
        """Returns the threads to read in this turn besides the busy threads: all active threads, and a quarter of the
        idle threads, at least 8 and at most 32.
        """
        known = {*self.busy, *self.active}
        idle = [tid for tid in self.tids if tid not in known]
        count = min(len(idle), max(8, min(MAX_ACTIVE, len(idle) // 4)))
        first = self.turned % len(idle) if idle else 0
        self.turned = first + count
        return [*self.active, *(idle + idle)[first : first + count]]


class Selection:
    """Builds each request. ``listed``, ``counted`` and ``busiest`` store results of the last answer."""

    def __init__(self) -> None:
        self._watched: dict[_Key, Watched] = {}
        self._others: dict[_Key, float] = {}
        self._pids: list[int] = []
        self._at = 0
        self._turn = 0
        self.left_out = 0

    def request(self, live: Sequence[Identity]) -> Header:
        """Returns the arguments of the request ``usage`` for the watched processes ``live`` and the busiest other
        processes; empty if no watched process is due in this turn."""
        self._turn += 1
        self.left_out = max(0, len(live) - MAX_WATCHED)
        self._watched = {(who.pid, who.start_ns): self._of(who) for who in live[:MAX_WATCHED]}
        targets = [
            self._target(key, watched, threads=n < MAX_WITH_THREADS)
            for n, (key, watched) in enumerate(self._watched.items())
            if self._turn % watched.every() == 0
        ]
        if not targets:
            return {}
        self._others = {key: share for key, share in self._others.items() if key not in self._watched}
        targets += [[*key, False, False, [], [key[0]]] for key in self._others]
        return {"targets": targets, "glances": self._glances(), "pids": self._turn % _PIDS_TURNS == 1}

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """Returns the identity of a watched process; None for another process."""
        watched = self._watched.get((pid, start_ns))
        return watched.who if watched else None

    def listed(self, pids: Sequence[int], threads: Mapping[str, Sequence[int]]) -> None:
        """Stores the lists that a request asked for: pids of the node, and threads by pid."""
        if pids:
            self._pids = list(pids)
        for (pid, _), watched in self._watched.items():
            if (tids := threads.get(str(pid))) is not None:
                watched.tids, watched.listed = list(tids), self._turn

    def counted(self, threads: Mapping[_Key, int]) -> None:
        """Stores the number of threads of each process. If it has changed, the threads are listed again soon."""
        for key, count in threads.items():
            if key in self._watched:
                self._watched[key].threads = count

    def busiest(self, threads: Mapping[_Key, Mapping[int, float]], processes: Mapping[_Key, float]) -> None:
        """Stores shares of a CPU. ``threads``: by process, the share of a CPU that each thread used or waited for,
        busiest first. ``processes``: the share that each process used.
        """
        for key, watched in self._watched.items():
            if key not in processes:
                continue  # the process was not read in this turn, or is read for the first time
            wanted = threads.get(key, {})
            still = processes[key] < STILL_SHARE and max(wanted.values(), default=0.0) < LEAST_SHARE
            watched.still = watched.still + 1 if still else 0
            shares = {tid: share for tid, share in wanted.items() if tid != key[0]}
            busy = [tid for tid, share in shares.items() if share >= LEAST_SHARE][:MAX_BUSY]
            watched.busy = [key[0], *busy]
            watched.active = [tid for tid in shares if tid not in busy][:MAX_ACTIVE]
        found = {key: share for key, share in processes.items() if share >= LEAST_SHARE and key not in self._watched}
        self._others = dict(sorted(found.items(), key=lambda item: -item[1])[:MAX_OTHERS])

    def _of(self, who: Identity) -> Watched:
        found = self._watched.get((who.pid, who.start_ns))
        if found is None:
            return Watched(who, [who.pid])
        found.who = who
        return found

    def _target(self, key: _Key, watched: Watched, *, threads: bool) -> list[Any]:
        if watched.who.role != "trainer" or not threads:
            return [*key, True, False, [], [key[0]]]
        age = self._turn - watched.listed
        changed = watched.threads != len(watched.tids) and age >= _NEW_THREADS_TURNS
        return [*key, True, changed or age >= _LIST_TURNS, watched.busy, watched.rest()]

    def _glances(self) -> list[int]:
        known = {pid for pid, _ in self._watched} | {pid for pid, _ in self._others}
        count = max(LEAST_GLANCES, min(MAX_GLANCES, len(self._pids) // _ROUND_TURNS))
        slice_ = self._pids[self._at : self._at + count]
        self._at = self._at + count if self._at + count < len(self._pids) else 0
        return [pid for pid in slice_ if pid not in known]
