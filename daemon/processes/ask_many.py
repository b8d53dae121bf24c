"""Reads many processes that take several requests each, in threads: one that fails or is slow delays no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple, TypeVar

from probing.api.errors import ProbingError, TargetTimeout

__all__ = ("GRACE_S", "PATIENCE_S", "Failure", "ask_each", "seconds_left")

# The transfer of a reader's answer may take so long, beyond the time that it spends on a process.
_MARGIN_S = 0.05
# A reader takes about a millisecond for a process; one that is blocked for longer than this must not delay the others.
PATIENCE_S = 0.04
# A reader keeps the deadline itself. One that is stuck is given up this much later, and its target is left alone.
GRACE_S = 1.0
_HINT = "ask for fewer processes, or wait longer"
_Key = tuple[int, int]
_Row = TypeVar("_Row")


class Failure(NamedTuple):
    """A process that could not be read, and why."""

    pid: int
    start_ns: int
    error: ProbingError


def ask_each(
    pool: Executor, targets: Iterable[_Key], ask: Callable[[int, int], list[_Row]], deadline: float, what: str
) -> tuple[list[_Row], list[Failure]]:
    """Calls ``ask(pid, start_ns)`` in the threads of ``pool``; returns the rows of all, and the targets that failed.

    ``deadline`` is on time.monotonic(); ``what`` names the rows in the message of a timeout.
    """
    asked = [(t, pool.submit(ask, *t)) for t in dict.fromkeys(targets)]
    rows: list[_Row] = []
    failures: list[Failure] = []
    for target, future in asked:
        outcome = _outcome(target, future, deadline, what)
        if isinstance(outcome, Failure):
            failures.append(outcome)
        else:
            rows += outcome
    return rows, failures


def seconds_left(deadline: float, what: str = "the process") -> float:
    """Seconds until ``deadline`` (time.monotonic()). Raises TargetTimeout when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TargetTimeout(f"there was no time left for {what}", hint=_HINT)
    return seconds


def _outcome(target: _Key, future: Future[list[_Row]], deadline: float, what: str) -> list[_Row] | Failure:
    try:
        return future.result(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    except ProbingError as e:
        return Failure(*target, e)
    except FutureTimeout:
        future.cancel()
        return Failure(*target, TargetTimeout(f"the {what} could not be read in time", hint=_HINT))
