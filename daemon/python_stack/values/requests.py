"""Reads variables on demand for the collector, through readers, with a request for each process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from probing.api.errors import InternalError
from probing.daemon.processes.reader_pool import GRACE_S, PATIENCE_S, Failure, ReaderPool, ask_each, seconds_left
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.stack_wire import NamedVariable

__all__ = ("Values",)


class Values:
    """Reads variables. Thread-safe. ``prepare`` is ``PythonStacks.prepare``. At most ``parallel`` processes are read at
    once.
    """

    def __init__(
        self, readers: ReaderPool, prepare: Callable[[int, int, float], RuntimeInfo], *, parallel: int = 4
    ) -> None:
        self._readers = readers
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="values")

    def close(self) -> None:
        """Refuses new requests; requests in progress end at their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def values(
        self, targets: Iterable[tuple[int, int]], names: Sequence[str], timeout: float = 1.0
    ) -> tuple[list[NamedVariable], list[Failure]]:
        """Returns the variables ``names`` of all ``targets`` (pid, start_ns), and the failures.

        A value is a row of ``values.read.read_values``, with ``pid`` and ``start_ns``. ``timeout``: seconds for all
        targets together.
        """
        deadline = time.monotonic() + timeout

        def ask(pid: int, start_ns: int) -> list[NamedVariable]:
            return self.of_process(pid, start_ns, names, deadline)

        return ask_each(self._pool, targets, ask, deadline, "values")

    def of_process(self, pid: int, start_ns: int, names: Sequence[str], deadline: float) -> list[NamedVariable]:
        """Returns the variables of one process, read in the calling thread, until ``deadline`` (time.monotonic()).

        Raises the errors of ``PythonStacks.prepare`` and ``values.read.read_values``.
        """
        runtime = self._prepare(pid, start_ns, seconds_left(deadline))
        seconds = seconds_left(deadline)
        answer = self._readers.call(
            "vars",
            pid=pid,
            start_ns=start_ns,
            timeout=seconds + GRACE_S,
            patience=PATIENCE_S,
            runtime=runtime.to_dict(),
            names=list(names),
            timeout_ms=max(1, int(seconds * 1000)),
        )
        values = answer.header.get("values")
        if not isinstance(values, list):
            raise InternalError("a reader's answer contains no values")
        rows: list[NamedVariable] = values
        return [{**row, "pid": pid, "start_ns": start_ns} for row in rows]
