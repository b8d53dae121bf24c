"""Answers the collector's request for the condition of processes: asks readers about all of them at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from probing.api.errors import InternalError, ProbingError
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool
from probing.daemon.source import Identity

__all__ = ("ConditionAnswers",)

# The time for a process, s; a reader may wait for a lock of the kernel that the process holds.
PATIENCE_S = 0.25
_Chosen = Callable[[Sequence[int], str], list[Identity]]


class ConditionAnswers:
    """Answers requests for conditions of processes. ``chosen`` is ``StackAnswers.chosen``."""

    def __init__(self, readers: ReaderPool, chosen: _Chosen) -> None:
        self._readers = readers
        self._chosen = chosen

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> dict[str, Any]:
        """Returns ``processes``, ``loads`` and ``failures``. Raises NotFound for an unknown job or pid.

        ``processes``: job, run, rank and role of each, and the fields of ``read_condition``. ``loads``: all processes
        of the node as ``counters.Load``, None when they were not read in time. ``timeout``: seconds for all readings.
        """
        deadline = time.monotonic() + timeout
        by_key = {(i.pid, i.start_ns): i for i in self._chosen(pids, job)}
        milliseconds = max(1, int(timeout * 1000))
        asks = {key: partial(dict[str, Any], timeout_ms=milliseconds, tid=who.trains) for key, who in by_key.items()}
        processes, failures = [], []
        answers = self._readers.call_each("condition", asks, timeout=timeout + GRACE_S, patience=PATIENCE_S)
        for (pid, start_ns), answer in answers:
            who = by_key[pid, start_ns]
            if isinstance(answer, ProbingError):
                failures.append({"pid": pid, "rank": who.rank, "job": who.job, "error": answer.to_dict()})
            else:
                found = json.loads(answer.payload)
                processes.append({"job": who.job, "run": who.run, "rank": who.rank, "role": who.role, **found})
        return {"processes": processes, "loads": self._loads(deadline - time.monotonic()), "failures": failures}

    def _loads(self, timeout: float) -> list[list[Any]] | None:
        if timeout <= 0:
            return None
        try:
            answer = self._readers.call("loads", timeout=timeout + GRACE_S, timeout_ms=max(1, int(timeout * 1000)))
        except ProbingError:
            return None
        found = json.loads(answer.payload)
        if not isinstance(found, list | None):
            raise InternalError("a reader's list of processes is not a list")
        return found
