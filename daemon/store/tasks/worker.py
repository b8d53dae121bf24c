"""Runs the store's tasks in a process without rights, or in this process if no such process can be started.

A task reads open files and yields steps (``messages``). Its fields come from JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import InternalError, ProbingError, StoreError
from probing.daemon.ipc import MAX_FDS, Channel, ChannelClosed, ChannelTimeout, Header, Message
from probing.daemon.pool import Policy, Pool, Process
from probing.daemon.store.files import FileReader, Files, open_file
from probing.daemon.store.tasks.merge import merge
from probing.daemon.store.tasks.messages import Step, Turn, unpack_step
from probing.daemon.store.tasks.salvage import salvage
from probing.daemon.store.tasks.seal import seal
from probing.daemon.store.tasks.segment_output import Source

__all__ = ("MAINTENANCE", "TASKS", "File", "LocalWorker", "RemoteWorker", "Task", "Worker", "WorkerFailed")

TASKS: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "merge": merge,
    "salvage": salvage,
    "seal": seal,
}
# The timeouts of one step of a task, and of the start of the process, s. They are long enough for a busy machine.
TIMEOUT_S = 120.0
START_TIMEOUT_S = 20.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
# The process ends soon after it becomes idle, and after 64 uses, to return its memory.
MAINTENANCE = Policy("maintenance process", kept=0, idle_s=5.0, uses=64, fails_fast=True)
# After this many consecutive failures of the process at one kind of task, the next task of this kind runs in the
# collector.
MAX_FAILURES = 8
_log = logging.getLogger(__name__)
# The path of a file and its size in bytes.
File = tuple[Path, int]


class WorkerFailed(StoreError):
    """The maintenance process ended or hung. ``resting``: the process failed earlier, and the pause before its next
    start is not over.
    """

    default_hint = "the collector retries by itself, and logs each attempt"

    def __init__(self, message: str, *, resting: bool = False) -> None:
        super().__init__(message)
        self.resting = resting


class Task(Protocol):
    """A running task. ``done``: its last step was read. After an error only ``close`` may be called."""

    done: bool

    def turn(self) -> Iterator[Step]:
        """Yields the steps up to the next turn, all of which must be read.

        Raises FormatError, OSError, pa.ArrowException, or WorkerFailed.
        """

    def close(self) -> None: ...


class Worker(Protocol):
    """Runs tasks. Thread-safe. ``problem``: why tasks do not run as intended, or ""."""

    problem: str

    def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
        """Starts the task ``what`` of TASKS with ``files``. Raises OSError, WorkerFailed."""

    def rest(self) -> None:
        """Returns unused memory to the operating system; called each second."""

    def close(self) -> None: ...


class LocalWorker:
    """Runs tasks in this process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.problem = ""

    def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
        readers = [FileReader(self._files, path, size) for path, size in files]
        return _LocalTask(TASKS[what](readers, fields))

    def rest(self) -> None:
        pa.default_memory_pool().release_unused()

    def close(self) -> None: ...


class _LocalTask:
    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self.done = False

    def turn(self) -> Iterator[Step]:
        for step in self._steps:
            if isinstance(step, Turn):
                return
            yield step
        self.done = True

    def close(self) -> None:
        self._steps = iter(())


class RemoteWorker:
    """Runs tasks in a process: each connection to the socket ``path`` starts a process, which ends when it is idle.

    If no process can be started, or a kind of task fails too often, tasks run in this process and use the memory of
    this process.
    """

    def __init__(self, path: Path, files: Files, policy: Policy = MAINTENANCE) -> None:
        self._pool = Pool(str(path), policy)
        self._local = LocalWorker(files)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        # None while no task is open.
        self._process: Process | None = None
        # The kind of each open task, by its number.
        self._open: dict[int, str] = {}
        # The number of consecutive failures of the process, by kind of task.
        self._failures: Counter[str] = Counter()
        self._pause = 0.0
        self._until = 0.0
        self._startable = True
        self.problem = ""

    def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
        with self._lock:
            process = None if self._failures[what] >= MAX_FAILURES else self._ready()
            if process is None:
                self._failures[what] = 0
                return self._local.start(what, files, **fields)
            number = next(self._numbers)
            self._open[number] = what
            try:
                _begin(process.channel, number, what, [path for path, _ in files], fields)
            except (ChannelClosed, ChannelTimeout) as e:
                raise self._failed(e, what) from e
            except BaseException:
                self._end(number)
                raise
            return _RemoteTask(self, number)

    def rest(self) -> None:
        self._local.rest()

    def close(self) -> None:
        with self._lock:
            self._give_up()
        self._pool.close()

    def ask(self, number: int, header: Header) -> Iterator[Message]:
        """Yields the answers to one request about a task. A caller that does not read all answers ends the process."""
        with self._lock:
            process, finished, what = self._process, False, self._open.get(number)
            if process is None or what is None:
                raise WorkerFailed("the maintenance process was ended, and the task with it")
            try:
                process.channel.send(header, timeout=TIMEOUT_S)
                while not finished:
                    answer = process.channel.answer(TIMEOUT_S)
                    finished = "turn" in answer.header or "end" in answer.header
                    yield answer
                self._worked(what)
                if "end" in answer.header:
                    self._end(number)
            except InternalError as e:
                # ChannelClosed and ChannelTimeout are InternalErrors, like errors that the process itself sends.
                finished = True
                raise self._failed(e, what) from e
            except ProbingError:
                finished = True
                self._end(number)
                raise
            finally:
                if not finished:
                    self._give_up()

    def drop(self, number: int) -> None:
        """Tells the process to end a task before its last step."""
        with self._lock:
            if number in self._open and self._process is not None:
                with contextlib.suppress(InternalError):
                    self._process.channel.send({"op": "drop", "job": number}, timeout=TIMEOUT_S)
                self._end(number)

    def _end(self, number: int) -> None:
        """Removes a task from the open tasks, and releases the process after the last open task."""
        self._open.pop(number, None)
        if not self._open and self._process is not None:
            self._pool.release(self._process)
            self._process = None

    def _give_up(self) -> None:
        self._open.clear()
        if self._process is not None:
            self._pool.discard(self._process)
            self._process = None

    def _failed(self, why: InternalError, what: str) -> WorkerFailed:
        """Gives up the process, delays the start of a new process, and returns the error for the task."""
        self._give_up()
        self._failures[what] += 1
        self.problem = f"the maintenance process failed: {why.message}"
        self._rest_longer()
        _log.warning("%s; it is started again in %g s", self.problem, self._pause)
        return WorkerFailed(self.problem)

    def _rest_longer(self) -> None:
        self._pause = min(max(FIRST_PAUSE_S, self._pause * 2), LAST_PAUSE_S)
        self._until = time.monotonic() + self._pause

    def _worked(self, what: str) -> None:
        del self._failures[what]
        self._pause = 0.0
        if self.problem:
            _log.info("the maintenance process works again")
        self.problem, self._startable = "", True

    def _ready(self) -> Process | None:
        """Returns the process, started if need be; None if it cannot be started."""
        if self._process is None:
            if time.monotonic() < self._until:
                if self._startable:
                    raise WorkerFailed(self.problem, resting=True)
                return None
            try:
                self._process = self._pool.acquire(time.monotonic() + START_TIMEOUT_S)
            except ProbingError as e:
                self._startable = False
                self.problem = f"{e.message}; the collector itself seals and merges"
                self._rest_longer()
        return self._process


def _begin(channel: Channel, number: int, what: str, paths: Sequence[Path], fields: Mapping[str, Any]) -> None:
    with contextlib.ExitStack() as undo:
        fds = []
        for path in paths:
            fds.append(open_file(path))
            undo.callback(os.close, fds[-1])
        for start in range(0, len(fds), MAX_FDS):
            header = {"op": "give", "job": number}
            channel.send(header, b"", fds[start : start + MAX_FDS], timeout=TIMEOUT_S)
    # The fields are sent as the payload, because the schemas of many wide tables exceed the size limit of a header.
    channel.send({"op": "begin", "job": number, "what": what}, json.dumps(fields).encode())


class _RemoteTask:
    def __init__(self, worker: RemoteWorker, number: int) -> None:
        self._worker = worker
        self._number = number
        self.done = False

    def turn(self) -> Iterator[Step]:
        for answer in self._worker.ask(self._number, {"op": "next", "job": self._number}):
            if "end" in answer.header:
                self.done = True
            elif "turn" not in answer.header:
                yield unpack_step(answer.header, answer.payload)

    def close(self) -> None:
        if not self.done:
            self._worker.drop(self._number)
