"""Reads the stacks and conditions of a job's processes, twice, in threads: meanwhile the stored rows are queried."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from probing.api.errors import NotFound, ProbingError
from probing.daemon.diagnose.gather.conditions import read_conditions
from probing.daemon.diagnose.gather.tables import Collector, seconds_left
from probing.daemon.stack_wire import ProcessStacks
from probing.diagnosis.facts import Missing

__all__ = ("ReadingResult", "Readings")

# The time between two readings, s.
APART_S = 0.25
# How many processes' native stacks are read.
MAX_NATIVE = 8
# One process that does not answer must not take the time of the others.
_READ_S = 2.0
# The first native stacks of a build of torch take seconds.
_NATIVE_S = 3.0
_MAX_FAILURES = 16
_KINDS = ("stacks", "condition", "native stacks")
_T = TypeVar("_T")


@dataclass
class ReadingResult:
    """What was read in time. ``stacks`` and ``conditions``: up to two readings each, in their order."""

    stacks: list[list[ProcessStacks]] = field(default_factory=list)
    native: list[ProcessStacks] = field(default_factory=list)
    conditions: list[Mapping[str, Any]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


class Readings:
    """Reads the processes of ``job`` until ``deadline`` (time.monotonic()); native stacks of the pids ``native``."""

    def __init__(self, collector: Collector, job: str, native: Sequence[int], deadline: float) -> None:
        self._collector = collector
        self._job = job
        self._native = list(native[:MAX_NATIVE])
        self._deadline = deadline
        self._patience = (deadline, deadline, min(deadline, time.monotonic() + _NATIVE_S))
        self._found = ReadingResult()
        self._lock = threading.Lock()
        reads = (self._read_stacks, self._read_conditions, self._read_native)
        self._threads = [
            threading.Thread(target=self._read, args=(kind, read), name=f"facts-{kind.split()[0]}", daemon=True)
            for kind, read in zip(_KINDS, reads, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> ReadingResult:
        """Returns what was read before the deadline."""
        for thread, kind, deadline in zip(self._threads, _KINDS, self._patience, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._add_missing(kind.split()[-1], f"the {kind} of job {self._job} did not come in time")
        with self._lock:
            found = self._found
            return ReadingResult(list(found.stacks), list(found.native), list(found.conditions), list(found.missing))

    def _read(self, kind: str, read: Callable[[], None]) -> None:
        try:
            read()
        except Exception as e:
            self._add_missing(kind.split()[-1], f"the {kind} of job {self._job} make no sense: {type(e).__name__}")

    def _read_stacks(self) -> None:
        first = self._stacks([], with_locals=True)
        self._wait()
        second = self._stacks([])
        with self._lock:
            self._found.stacks = [one for one in (first, second) if one is not None]

    def _read_native(self) -> None:
        found = self._stacks(self._native, native=True) if self._native else None
        with self._lock:
            self._found.native = found or []

    def _read_conditions(self) -> None:
        def read() -> Mapping[str, Any]:
            return read_conditions(self._collector, self._job, self._timeout())

        first = self._tried("condition", read)
        self._wait()
        second = self._tried("condition", read)
        found = [one for one in (first, second) if one is not None]
        with self._lock:
            self._found.conditions = found
        if found:
            self._add_failures("condition", found[-1]["failures"])

    def _stacks(
        self, pids: Sequence[int], *, native: bool = False, with_locals: bool = False
    ) -> list[ProcessStacks] | None:
        def read() -> tuple[list[ProcessStacks], list[dict[str, Any]]]:
            job = "" if pids else self._job
            return self._collector.stacks(pids, job, self._timeout(), native=native, with_locals=with_locals)

        answer = self._tried("native stacks" if native else "stacks", read)
        if answer is None:
            return None
        if with_locals:
            self._add_failures("stacks", answer[1])
        return answer[0]

    def _tried(self, kind: str, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except NotFound:
            # A process, or the last one of the job, has just ended.
            return None
        except ProbingError as e:
            self._add_missing(kind.split()[-1], f"no {kind} of job {self._job}: {e.message}")
        return None

    def _add_failures(self, kind: str, failures: Sequence[Mapping[str, Any]]) -> None:
        for failure in failures[:_MAX_FAILURES]:
            text = f"no {kind} of pid {failure['pid']}: {failure['error'].get('message', '')}"
            self._add_missing(kind, text, failure.get("rank"))

    def _add_missing(self, kind: str, text: str, rank: int | None = None) -> None:
        with self._lock:
            self._found.missing.append(Missing(kind, text, rank))

    def _timeout(self) -> float:
        return min(seconds_left(self._deadline), _READ_S)

    def _wait(self) -> None:
        time.sleep(min(APART_S, max(0.0, self._deadline - time.monotonic())))
