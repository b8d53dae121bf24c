"""Answers requests for the conditions of processes, which readers read in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from probing.api.errors import ProbingError
from probing.daemon.ipc import Header
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool, payload_of
from probing.daemon.source import Identity
from probing.daemon.stack_wire import ConditionsRead, Load, ReadFailure

__all__ = ("ConditionAnswers",)

# The maximum seconds for which one process may block a reader. A read can wait for a kernel lock that the process
# holds.
PATIENCE_S = 0.25
_Chosen = Callable[[Sequence[int], str], list[Identity]]


class ConditionAnswers:
    """Answers requests for conditions of processes. ``chosen`` is ``StackAnswers.chosen``."""

    def __init__(self, readers: ReaderPool, chosen: _Chosen) -> None:
        self._readers = readers
        self._chosen = chosen

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> ConditionsRead:
        """Returns the conditions. Raises NotFound for an unknown job or pid. ``timeout``: seconds for all readings."""
        deadline = time.monotonic() + timeout
        by_key = {(i.pid, i.start_ns): i for i in self._chosen(pids, job)}
        milliseconds = max(1, int(timeout * 1000))
        asks = {key: partial(Header, timeout_ms=milliseconds, tid=who.trains) for key, who in by_key.items()}
        processes: list[Header] = []
        failures: list[ReadFailure] = []
        answers = self._readers.call_each("condition", asks, timeout=timeout + GRACE_S, patience=PATIENCE_S)
        for (pid, start_ns), answer in answers:
            who = by_key[pid, start_ns]
            if isinstance(answer, ProbingError):
                failures.append({"pid": pid, "rank": who.rank, "job": who.job, "error": answer.to_dict()})
            else:
                found = payload_of(Header, answer)
                processes.append({"job": who.job, "run": who.run, "rank": who.rank, "role": who.role, **found})
        return {"processes": processes, "loads": self._loads(deadline - time.monotonic()), "failures": failures}

    def _loads(self, timeout: float) -> list[Load] | None:
        if timeout <= 0:
            return None
        try:
            answer = self._readers.call("loads", timeout=timeout + GRACE_S, timeout_ms=max(1, int(timeout * 1000)))
        except ProbingError:
            return None
        return None if answer.payload == b"null" else payload_of(list[Load], answer)
