"""Runs the tasks of the store; here in this process, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import StoreError
from probing.daemon.store.files import FileReader, Files
from probing.daemon.store.tasks.messages import Step, Turn
from probing.daemon.store.tasks.registry import TASKS

__all__ = ("File", "LocalWorker", "Task", "Worker", "WorkerFailed")

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
        """Begins the task ``what`` of ``registry.TASKS`` over ``files``. Raises OSError, WorkerFailed."""

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
