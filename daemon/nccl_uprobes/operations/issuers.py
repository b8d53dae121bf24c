"""Finds the thread of each process that issues its collectives: the training thread, which need not be the main thread.

Ray Train, vLLM's engine and embedded interpreters train in a thread of their own, while the main thread waits for
tasks. Other threads, such as the thread of an asynchronous checkpoint, issue fewer collectives than the training
thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from probing.daemon.columns import Array
from probing.daemon.processes.liveness import thread_exists
from probing.daemon.source import ProcessKey

__all__ = ("Issuers",)

MAX_PROCESSES = 4_096
MAX_THREADS = 64
# Each change makes a reader read the stacks of the process. So after MAX_CHANGES changes, at most one change is
# reported in CHANGE_S seconds.
MAX_CHANGES, CHANGE_S = 16, 60.0
# The counts are halved when a thread has issued this many collectives, so that another thread can take over.
_MOST = 1 << 10


class _Reported(NamedTuple):
    """The thread that was reported last, the number of changes, and the time of the last change (time.monotonic())."""

    tid: int
    changes: int
    at: float


class Issuers:
    """Counts the collectives of the threads of each process. Not thread-safe.

    ``changed(pid, start_ns, tid)`` is called when another thread becomes the one that issues the most collectives. The
    main thread is assumed at the beginning, without a call, and wins if several threads issue equally many. ``runs(pid,
    tid)`` returns whether a thread still exists.
    """

    def __init__(
        self,
        changed: Callable[[int, int, int], None],
        runs: Callable[[int, int], bool] = thread_exists,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = changed
        self._runs = runs
        self._now = now
        self._counts: dict[ProcessKey, dict[int, int]] = {}
        self._main_alone: OrderedDict[ProcessKey, None] = OrderedDict()
        self._reported: dict[ProcessKey, _Reported] = {}

    def follow(self, records: Array, processes: Iterable[ProcessKey]) -> None:
        """Counts ``records``, operations of the ring ``collectives``; ``processes``: the processes that issued them."""
        # In nearly all processes the main thread issues all operations. Only the records of the other processes are
        # counted, which saves time.
        pids = {key.pid for key in self._counts} | set(records["tgid"][records["tid"] != records["tgid"]].tolist())
        self._note_alone(key for key in processes if key.pid not in pids)
        if pids:
            issued = _issued(records[np.isin(records["tgid"], np.array([*pids], np.int64))])
            for key, counts_by_tid in issued.items():
                self._count(key, counts_by_tid)

    def forget(self, key: ProcessKey) -> None:
        """Drops the counts of a process that ended or called exec."""
        self._counts.pop(key, None)
        self._main_alone.pop(key, None)
        self._reported.pop(key, None)

    def _note_alone(self, keys: Iterable[ProcessKey]) -> None:
        self._main_alone.update(dict.fromkeys(keys))
        while len(self._main_alone) > MAX_PROCESSES:
            self._main_alone.popitem(last=False)

    def _count(self, key: ProcessKey, issued: dict[int, int]) -> None:
        threads = self._counts.get(key)
        if threads is None:
            if issued.keys() == {key.pid}:
                self._note_alone([key])
                return
            # Operations were not counted while only the main thread issued any.
            threads = {key.pid: _MOST} if key in self._main_alone else {}
            while len(self._counts) >= MAX_PROCESSES:
                self.forget(next(iter(self._counts)))
        if issued.keys() - threads.keys():
            # Ended threads are dropped: a process may start a new thread for each run of its training function.
            threads = {tid: count for tid, count in threads.items() if self._runs(key.pid, tid)}
        for tid, count in issued.items():
            if tid in threads or len(threads) < MAX_THREADS:
                threads[tid] = min(threads.get(tid, 0) + count, 2 * _MOST)
        if max(threads.values()) > _MOST:
            threads = {tid: count // 2 for tid, count in threads.items() if count > 1}
        self._counts[key] = threads
        most = max(threads, key=lambda tid: (threads[tid], tid == key.pid))
        reported = self._reported.get(key, _Reported(key.pid, 0, 0.0))
        now = self._now()
        if most != reported.tid and (reported.changes < MAX_CHANGES or now >= reported.at + CHANGE_S):
            self._reported[key] = _Reported(most, reported.changes + 1, now)
            self._changed(*key, most)


def _issued(records: Array) -> dict[ProcessKey, dict[int, int]]:
    """Returns the number of records of each thread, by process."""
    threads = np.stack([records[name].astype(np.int64) for name in ("tgid", "start_ns", "tid")])
    distinct, counts = np.unique(threads, axis=1, return_counts=True)
    issued: dict[ProcessKey, dict[int, int]] = {}
    for (pid, start_ns, tid), count in zip(distinct.T.tolist(), counts.tolist(), strict=True):
        issued.setdefault(ProcessKey(pid, start_ns), {})[tid] = count
    return issued
