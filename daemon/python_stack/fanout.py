"""Asking for many processes at once, each for itself: what came in time, and a failure for every other one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

from probing.api.errors import ProbingError, TargetTimeout

__all__ = ("GRACE_S", "PATIENCE_S", "Failure", "ask_each", "left")

# What a reader's answer may take on its way, beyond the time it spends on a process.
_MARGIN_S = 0.05
# A reader takes about a millisecond for a process; one that is blocked for longer than this must not delay the others.
PATIENCE_S = 0.04
# A reader minds the deadline itself. Only one that is stuck is given up, and its target left alone: so much later.
GRACE_S = 1.0
_HINT = "ask for fewer processes, or wait longer"
_Target = tuple[int, int]
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that was asked for and could not be read."""

    pid: int
    start_ns: int
    error: ProbingError


def ask_each(
    pool: Executor, targets: Iterable[_Target], ask: Callable[[int, int], list[_Row]], deadline: float, what: str
) -> tuple[list[_Row], list[Failure]]:
    """All rows of ``ask(pid, start_ns)``, and those that failed; ``what`` is read, until ``deadline`` (monotonic)."""
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


def left(deadline: float, what: str = "the process") -> float:
    """Seconds until ``deadline`` (time.monotonic()). Raises TargetTimeout when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TargetTimeout(f"there was no time left for {what}", hint=_HINT)
    return seconds


def _outcome(target: _Target, future: Future[list[_Row]], deadline: float, what: str) -> list[_Row] | Failure:
    try:
        return future.result(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    except ProbingError as e:
        return Failure(*target, e)
    except FutureTimeout:
        future.cancel()
        return Failure(*target, TargetTimeout(f"the {what} could not be read in time", hint=_HINT))
