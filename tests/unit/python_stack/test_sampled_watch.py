"""The visits of sampled processes: whose turn it is when all workers are busy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from waiting import until

from probing.api.errors import NotPython, ProbingError
from probing.daemon.python_stack.sampling.watch import _WORKERS, SampledWatch
from probing.daemon.source import Identity, ProcessKey


class Enrolment:
    """Enrols processes; one of owner 7 takes until it may ``go``."""

    def __init__(self) -> None:
        self.visited: list[int] = []
        self.changes: list[tuple[str, int]] = []
        self.error: ProbingError | None = None
        self.go = threading.Semaphore(0)

    def bring_up(self, key: ProcessKey, *_: Any) -> bool:
        self.visited.append(key.pid)
        if self.error is not None:
            raise self.error
        self.changes.append(("added", key.pid))
        if key.pid >= 100:
            assert self.go.acquire(timeout=20)
        return False

    def adopt(self, *_: Any) -> bool:
        return False

    def start(self) -> None: ...

    stop = start

    def set_clock(self, _: Any) -> None: ...

    def remove(self, key: ProcessKey) -> None:
        self.changes.append(("removed", key.pid))


def test_processes_of_one_user_that_do_not_answer_hold_up_no_other() -> None:
    enrolment: Any = Enrolment()
    known: Any = SimpleNamespace(started=lambda _: None, find=lambda _: SimpleNamespace(identity=None))
    watch = SampledWatch(enrolment, known, lambda _: (19, False))
    for pid in (*range(100, 110), 20):
        watch.watch(Identity(pid, 1, "job", "run", "trainer", owner=7 if pid >= 100 else 8))
    watch.start()
    try:
        until(lambda: len(enrolment.visited) == _WORKERS, what="busy workers")
        enrolment.go.release()
        until(lambda: 20 in enrolment.visited, what="the process of the other user")
        assert len(enrolment.visited) <= _WORKERS + 2
    finally:
        for _ in range(20):
            enrolment.go.release()
        watch.stop()


def test_the_program_of_a_process_that_called_exec_is_sampled_no_more() -> None:
    enrolment: Any = Enrolment()
    known: Any = SimpleNamespace(
        started=lambda _: None, ended=lambda _: None, find=lambda _: SimpleNamespace(identity=None)
    )
    watch = SampledWatch(enrolment, known, lambda _: (19, False))
    watch.watch(Identity(20, 1, "job", "run", "trainer"))
    watch.start()
    try:
        # GIVEN a process that is sampled
        until(lambda: enrolment.changes == [("added", 20)], what="the first visit")
        # WHEN it runs a program that is no Python
        enrolment.error = NotPython("process 20 runs no CPython")
        watch.renew(ProcessKey(20, 1))
        until(lambda: len(enrolment.visited) >= 2, what="the visit of the new program")
        # THEN the threads of the earlier program are in the maps no longer
        until(lambda: enrolment.changes[-1] == ("removed", 20), what="the removal")
        # AND the next program is sampled
        enrolment.error = None
        watch.renew(ProcessKey(20, 1))
        until(lambda: enrolment.changes[-1] == ("added", 20), what="the visit of the next program")
    finally:
        watch.stop()
