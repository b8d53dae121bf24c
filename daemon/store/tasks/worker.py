"""Runs the tasks of the store that need no rights: in a process without rights, and here while there is none.

A task reads open files and yields steps (``messages``). Its fields come from JSON.
"""

from __future__ import annotations

import contextlib
import itertools
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
from probing.daemon.ipc import MAX_FDS, Channel, ChannelClosed, ChannelTimeout, Message, connect
from probing.daemon.store.files import FileReader, Files, open_file
from probing.daemon.store.tasks.merge import merge
from probing.daemon.store.tasks.messages import Step, Turn, unpack_step
from probing.daemon.store.tasks.salvage import salvage
from probing.daemon.store.tasks.seal import seal
from probing.daemon.store.tasks.segment_output import Source

__all__ = ("TASKS", "File", "LocalWorker", "RemoteWorker", "Task", "Worker", "WorkerFailed")

TASKS: dict[str, Callable[[Sequence[Source], Mapping[str, Any]], Iterator[Step]]] = {
    "merge": merge,
    "salvage": salvage,
    "seal": seal,
}
# For one step of a task, and for the start of the process, on a busy machine.
TIMEOUT_S = 120.0
START_TIMEOUT_S = 20.0
# The process ends after this time without work, and after this many tasks, to give back its memory.
IDLE_S = 5.0
MAX_TASKS = 64
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
# A kind of task that failed the process this often in a row runs here once, whatever memory it takes.
MAX_FAILURES = 8
_log = logging.getLogger(__name__)
# Path and size in bytes.
File = tuple[Path, int]


class WorkerFailed(StoreError):
    """The maintenance process ended or hung. ``resting``: it did so a moment ago, and was not started again yet."""

    default_hint = "it is tried again by itself; the collector's log has each attempt"

    def __init__(self, message: str, *, resting: bool = False) -> None:
        super().__init__(message)
        self.resting = resting


class Task(Protocol):
    """A task under way; ``done`` after its last step. After an error only ``close`` may be called."""

    done: bool

    def turn(self) -> Iterator[Step]:
        """Yields the steps up to the next turn; they must be read to the end.

        Raises FormatError, OSError, pa.ArrowException, or WorkerFailed.
        """

    def close(self) -> None: ...


class Worker(Protocol):
    """Runs tasks. Safe to call from any thread. ``problem``: why it does not work as intended; empty while it does."""

    problem: str

    def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
        """Begins the task ``what`` of TASKS over ``files``. Raises OSError, WorkerFailed."""

    def rest(self) -> None:
        """Gives back what has not been used for a while; called each second."""

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
    """Runs tasks in a process behind the socket ``path``, which starts one at each connection and ends it when idle.

    Tasks run here, which costs this process memory, when no process can be started or a kind of task fails too often.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._local = LocalWorker(files)
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._numbers = itertools.count(1)
        # The kind of each open task, and how often in a row tasks of a kind failed the process.
        self._open: dict[int, str] = {}
        self._failures: Counter[str] = Counter()
        self._begun = 0
        self._used = 0.0
        self._pause = 0.0
        self._until = 0.0
        self._startable = True
        self.problem = ""

    def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
        with self._lock:
            channel = self._ready()
            if channel is None or self._failures[what] >= MAX_FAILURES:
                self._failures[what] = 0
                return self._local.start(what, files, **fields)
            number = next(self._numbers)
            try:
                self._give(channel, number, [path for path, _ in files])
                channel.send({"op": "begin", "job": number, "what": what, "fields": fields})
            except (ChannelClosed, ChannelTimeout) as e:
                raise self._failed(e, what) from e
            self._open[number] = what
            self._begun += 1
            return _RemoteTask(self, number)

    def rest(self) -> None:
        with self._lock:
            if not self._open and (time.monotonic() - self._used > IDLE_S or self._begun >= MAX_TASKS):
                self._end()
        self._local.rest()

    def close(self) -> None:
        with self._lock:
            self._end()

    def ask(self, number: int, header: dict[str, Any]) -> Iterator[Message]:
        """Yields the answers to one request about a task; they must be read to the end, or the process is given up."""
        with self._lock:
            channel, finished, what = self._channel, False, self._open.get(number)
            if channel is None or what is None:
                raise WorkerFailed("the maintenance process was given up with the task")
            try:
                channel.send(header, timeout=TIMEOUT_S)
                while not finished:
                    answer = channel.answer(TIMEOUT_S)
                    finished = "turn" in answer.header or "end" in answer.header
                    yield answer
                self._worked(what)
            except InternalError as e:
                # ChannelClosed and ChannelTimeout are InternalErrors, like those that the process sends of itself.
                finished = True
                raise self._failed(e, what) from e
            except ProbingError:
                finished = True
                self._open.pop(number, None)
                raise
            finally:
                if not finished:
                    self._end()

    def dropped(self, number: int) -> None:
        """Ends a task in the process before its last step."""
        with self._lock:
            if number in self._open and self._channel is not None:
                del self._open[number]
                with contextlib.suppress(InternalError):
                    self._channel.send({"op": "drop", "job": number}, timeout=TIMEOUT_S)

    def ended(self, number: int) -> None:
        """The task is complete."""
        self._open.pop(number, None)

    def _failed(self, why: InternalError, what: str) -> WorkerFailed:
        """Gives the process up, and starts no other for a while."""
        self._end()
        self._failures[what] += 1
        self._pause = min(max(FIRST_PAUSE_S, self._pause * 2), LAST_PAUSE_S)
        self._until = time.monotonic() + self._pause
        self.problem = f"the maintenance process failed: {why.message}"
        _log.warning("%s; it is started again in %g s", self.problem, self._pause)
        return WorkerFailed(self.problem)

    def _worked(self, what: str) -> None:
        del self._failures[what]
        self._pause = 0.0
        self._used = time.monotonic()
        if self.problem:
            _log.info("the maintenance process works again")
        self.problem, self._startable = "", True

    def _ready(self) -> Channel | None:
        """Returns the process, started if need be; None when it cannot be started."""
        if self._channel is None:
            if time.monotonic() < self._until:
                if self._startable:
                    raise WorkerFailed(self.problem, resting=True)
                return None
            try:
                self._channel = self._fresh()
            except (ProbingError, OSError) as e:
                self._cannot_start(getattr(e, "message", str(e)))
        return self._channel

    def _fresh(self) -> Channel:
        channel = connect(str(self._path))
        try:
            channel.request({"op": "ping"}, timeout=START_TIMEOUT_S)
        except BaseException:
            channel.close()
            raise
        return channel

    def _cannot_start(self, why: str) -> None:
        self._pause = min(max(FIRST_PAUSE_S, self._pause * 2), LAST_PAUSE_S)
        self._until = time.monotonic() + self._pause
        self.problem = f"no maintenance process can be started, so the collector seals and merges itself: {why}"
        if self._startable:
            _log.warning("%s", self.problem)
        self._startable = False

    def _give(self, channel: Channel, number: int, paths: Sequence[Path]) -> None:
        with contextlib.ExitStack() as undo:
            fds = []
            for path in paths:
                fds.append(open_file(path))
                undo.callback(os.close, fds[-1])
            for start in range(0, len(fds), MAX_FDS):
                header = {"op": "give", "job": number}
                channel.send(header, b"", fds[start : start + MAX_FDS], timeout=TIMEOUT_S)

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        self._open.clear()
        self._begun = 0
        if channel is not None:
            channel.close()


class _RemoteTask:
    def __init__(self, worker: RemoteWorker, number: int) -> None:
        self._worker = worker
        self._number = number
        self.done = False

    def turn(self) -> Iterator[Step]:
        for answer in self._worker.ask(self._number, {"op": "next", "job": self._number}):
            if "end" in answer.header:
                self.done = True
                self._worker.ended(self._number)
            elif "turn" not in answer.header:
                yield unpack_step(answer.header, answer.payload)

    def close(self) -> None:
        if not self.done:
            self._worker.dropped(self._number)
