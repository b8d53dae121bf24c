"""Reads the stacks and conditions of a job's processes, twice, in threads, while the stored rows are queried.

The time-outs of the groups in which ranks wait are read once from each process.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from probing.api.errors import NotFound, ProbingError
from probing.daemon.diagnose.gather.conditions import read_conditions
from probing.daemon.diagnose.gather.processes import Key
from probing.daemon.diagnose.gather.tables import Collector, Row, seconds_left
from probing.daemon.stack_wire import ProcessStacks, ReadFailure
from probing.diagnosis.facts import Missing, TimeOut

__all__ = ("ReadingResult", "Readings", "TimeOuts")

# The time between two readings, s.
APART_S = 0.25
# The maximum number of processes whose native stacks are read.
MAX_NATIVE = 8
# The timeout of a reading, s: a process that does not answer must not use up the time of all other processes.
_READ_S = 2.0
# The timeout of native stacks, s: the first native stacks of a build of torch take seconds.
_NATIVE_S = 3.0
_MAX_FAILURES = 16
_KINDS = ("stacks", "condition", "native stacks")
_T = TypeVar("_T")


@dataclass
class ReadingResult:
    """The readings that were made in time. ``stacks`` and ``conditions``: up to two readings each, the earlier
    first.
    """

    stacks: list[list[ProcessStacks]] = field(default_factory=list)
    native: list[ProcessStacks] = field(default_factory=list)
    conditions: list[Mapping[str, Any]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


class Readings:
    """Reads the processes of ``job`` until ``deadline`` (time.monotonic()); ``native``: pids whose native stacks are
    read, too.
    """

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
        """Returns the readings made before the deadline."""
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
            self._add_missing(kind.split()[-1], f"the {kind} of job {self._job} are malformed: {type(e).__name__}")

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
        def read() -> tuple[list[ProcessStacks], list[ReadFailure]]:
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
            # A process, or the last process of the job, has just ended.
            return None
        except ProbingError as e:
            self._add_missing(kind.split()[-1], f"no {kind} of job {self._job}: {e.message}")
        return None

    def _add_failures(self, kind: str, failures: Sequence[ReadFailure]) -> None:
        for failure in failures[:_MAX_FAILURES]:
            text = f"no {kind} of pid {failure['pid']}: {failure['error'].get('message', '')}"
            self._add_missing(kind, text, failure["rank"])

    def _add_missing(self, kind: str, text: str, rank: int | None = None) -> None:
        with self._lock:
            self._found.missing.append(Missing(kind, text, rank))

    def _timeout(self) -> float:
        return min(seconds_left(self._deadline), _READ_S)

    def _wait(self) -> None:
        time.sleep(min(APART_S, max(0.0, self._deadline - time.monotonic())))


# In torch 2.13, distributed_c10d._pg_names maps each process group to its name. For gloo, that name is also the value
# of ``comm``.
_GROUPS = "module:torch.distributed.distributed_c10d._pg_names"
_GROUP = re.compile(r"ProcessGroup\(rank=\d{1,9}, size=\d{1,9}, (gloo|nccl), timeout=(\d{1,12}) ms\): '([^']{1,128})'")
_MAX_KNOWN = 1024
_MAX_READ = 16
_PATIENCE_S = 1.0
_MS = 1_000_000


class TimeOuts:
    """Keeps the time-outs of processes. A process is read again when it waits in a communicator in which it did not
    wait before. Thread-safe."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Key, frozenset[str]], tuple[TimeOut, ...]] = OrderedDict()

    def of_job(self, job: str, inflight: Iterable[Row], deadline: float) -> dict[Key, tuple[TimeOut, ...]]:
        """Returns the time-outs of the communicators with operations in flight, by process.

        ``inflight``: rows of comm.inflight; ``deadline``: time.monotonic(). Processes that cannot be read are left out.
        """
        waits: dict[Key, dict[str, str]] = defaultdict(dict)
        for row in inflight:
            if row["comm"]:
                waits[Key.of(row)][row["comm"]] = row["backend"] or ""
        keys = {key: (key, frozenset(comms)) for key, comms in waits.items()}
        with self._lock:
            new = [key for key, known in keys.items() if known not in self._known][:_MAX_READ]
        if new:
            texts = self._read(job, [key.pid for key in new], deadline)
            with self._lock:
                for key in new:
                    if key in texts:
                        self._known[keys[key]] = _time_outs(texts[key], waits[key])
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        with self._lock:
            return {key: self._known[known] for key, known in keys.items() if known in self._known}

    def _read(self, job: str, pids: Sequence[int], deadline: float) -> dict[Key, str]:
        try:
            answer = self._collector.variables(pids, job, [_GROUPS], min(seconds_left(deadline), _PATIENCE_S))
            return {Key.of(row): str(row["value"] or "") for row in answer["values"]}
        except (ProbingError, KeyError, TypeError):
            # The result lacks these processes; the next look tries again.
            return {}


def _time_outs(text: str, comms: Mapping[str, str]) -> tuple[TimeOut, ...]:
    """Returns the time-out of each communicator in ``comms``, according to the groups in ``text``. ``comms``: the
    backend by communicator.
    """
    groups = {name: (backend, int(ms)) for backend, ms, name in _GROUP.findall(text)}
    # NCCL's communicators and the groups have different names. The names do not matter if all groups of a backend have
    # the same time-out. They do matter if the text was cut, because groups are then missing.
    whole = text.count("ProcessGroup(") == len(groups) and text.endswith("}") and "..." not in text
    alike = set(groups.values()) if whole else set()
    found = []
    for comm, backend in sorted(comms.items()):
        of_backend = {ms for kind, ms in alike if kind == backend}
        group = groups.get(comm, (backend, of_backend.pop() if len(of_backend) == 1 else None))
        if group[0] == backend and group[1] is not None:
            found.append(TimeOut(comm, group[1] * _MS))
    return tuple(found)
