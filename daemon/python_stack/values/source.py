"""Variables on demand for the collector: the readers read them, each process for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from probing.api.errors import InternalError, ProbingError, TargetTimeout
from probing.daemon.python_stack.locate import RuntimeInfo
from probing.daemon.python_stack.source import Failure, Readers

__all__ = ("Values",)

# As for stacks (python_stack.source): what an answer takes on its way, a reader that stands still, one that is stuck.
_MARGIN_S = 0.05
_PATIENCE_S = 0.04
_GRACE_S = 1.0


class Values:
    """Safe to use from any thread. ``prepare`` is ``PythonStacks.prepare``; ``parallel`` processes are read at once."""

    def __init__(
        self, readers: Readers, prepare: Callable[[int, int, float], RuntimeInfo], *, parallel: int = 4
    ) -> None:
        self._readers = readers
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="values")

    def close(self) -> None:
        """What is under way ends by its own deadline; nothing new is taken."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def values(
        self, targets: Iterable[tuple[int, int]], names: Sequence[str], timeout: float = 1.0
    ) -> tuple[list[dict[str, Any]], list[Failure]]:
        """The variables ``names`` of all ``targets`` (pid, start_ns), and those that could not be read.

        A value is what ``values.read.read_values`` gives, with ``pid`` and ``start_ns``. ``timeout`` in seconds.
        """
        deadline = time.monotonic() + timeout
        asked = [(t, self._pool.submit(self.of_process, *t, names, deadline)) for t in dict.fromkeys(targets)]
        values: list[dict[str, Any]] = []
        failures: list[Failure] = []
        for target, future in asked:
            outcome = _outcome(target, future, deadline)
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                values += outcome
        return values, failures

    def of_process(self, pid: int, start_ns: int, names: Sequence[str], deadline: float) -> list[dict[str, Any]]:
        """The variables of one process, read in this thread; ``deadline`` is on time.monotonic().

        Raises as ``PythonStacks.prepare`` and ``values.read.read_values`` do.
        """
        runtime = self._prepare(pid, start_ns, _left(deadline))
        left = _left(deadline)
        answer = self._readers.call(
            "vars",
            pid=pid,
            start_ns=start_ns,
            timeout=left + _GRACE_S,
            patience=_PATIENCE_S,
            runtime=runtime.to_dict(),
            names=list(names),
            timeout_ms=max(1, int(left * 1000)),
        )
        values = answer.header.get("values")
        if not isinstance(values, list):
            raise InternalError("a reader's answer holds no values")
        return [{"pid": pid, "start_ns": start_ns, **value} for value in values]


def _outcome(
    target: tuple[int, int], future: Future[list[dict[str, Any]]], deadline: float
) -> list[dict[str, Any]] | Failure:
    try:
        return future.result(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    except ProbingError as e:
        return Failure(*target, e)
    except FutureTimeout:
        future.cancel()
        late = TargetTimeout("the values could not be read in time", hint="ask for fewer processes, or wait longer")
        return Failure(*target, late)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TargetTimeout("there was no time left for the process", hint="ask for fewer processes, or wait longer")
    return left
