"""The process that reads files of the store: it seals, merges, salvages and decodes them. It has no rights and writes
no file.

The supervisor starts it for the collector, as ``python -m probing.daemon.confined.store_maintenance`` with a connection
as descriptor 0; ``probingd verify`` and ``import`` start it with the argument ``decode``. It may be killed at any time.
Requests (``job``: the number of a task):

* ``ping``: answered with ``{"pid"}``.
* ``give`` (``job``, descriptors): adds files, in order, to the task. Not answered.
* ``begin`` (``job``, ``what``; the payload has the fields as JSON): begins the function ``what`` of ``tasks.worker`` or
  ``tasks.decode`` over the files of the task. Not answered.
* ``next`` (``job``): answered with the task's steps (``tasks.messages``) up to the next turn, or to ``{"end"}``.
* ``drop`` (``job``): ends a task that is not complete. Not answered.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa

from probing.api.errors import FormatError, InternalError, ProbingError, UsageError
from probing.daemon.confined.sandbox import confine, limit, stand_back
from probing.daemon.confined.serving import inherit, internal_error, requests
from probing.daemon.ipc import Channel, ChannelClosed, Message
from probing.daemon.store.tasks.decode import DECODING
from probing.daemon.store.tasks.messages import Step, Turn, pack_step
from probing.daemon.store.tasks.segment_output import Source
from probing.daemon.store.tasks.worker import TASKS

__all__ = ("main",)

MEMORY_BYTES = 3 << 30
# The limits of CPU time of the process, s. A decoder needs enough for a directory of 100 GB.
CPU_SECONDS, DECODER_CPU_SECONDS = 3600, 4 * 3600
MAX_FILES = 256
MAX_TEXT = 300


@dataclass
class _Task:
    files: list[Source] = field(default_factory=list)
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))

    def close(self) -> None:
        self.steps = iter(())
        for file in self.files:
            file.close()
        pa.default_memory_pool().release_unused()


def main() -> int:
    """Serves the connection at descriptor 0 until it closes."""
    channel, tasks = inherit(_give_up_rights), dict[int, _Task]()
    with suppress(ChannelClosed):
        for request in requests(channel):
            _take(channel, request, tasks)
    return 0


def _give_up_rights() -> None:
    if sys.argv[1:] == ["decode"]:
        limit(MEMORY_BYTES, DECODER_CPU_SECONDS)
    else:
        # This process keeps its CPU priority, since the log must not grow faster than it is sealed.
        stand_back(niceness=0)
        limit(MEMORY_BYTES, CPU_SECONDS)
    # Imported before ``confine``, because after it Landlock hides the files of the package.
    import pyarrow.parquet  # noqa: F401

    confine(())


def _take(channel: Channel, request: Message, tasks: dict[int, _Task]) -> None:
    op, header = request.header.get("op"), request.header
    if op == "ping":
        channel.send({"pid": os.getpid()})
        return
    number = int(header["job"])
    if op == "give":
        task = tasks.setdefault(number, _Task())
        task.files += [os.fdopen(request.take_fd(), "rb") for _ in range(len(request.fds))]
        if sum(len(other.files) for other in tasks.values()) > MAX_FILES:
            raise InternalError(f"the request has more than {MAX_FILES} files")
    elif op == "begin":
        task = tasks.setdefault(number, _Task())
        task.steps = {**TASKS, **DECODING}[header["what"]](task.files, json.loads(request.payload))
    elif op == "drop":
        tasks.pop(number, _Task()).close()
    elif op == "next":
        if _next(channel, tasks[number]):
            tasks.pop(number).close()
    else:
        raise UsageError(f"maintenance has no request {op!r}")


def _next(channel: Channel, task: _Task) -> bool:
    """Sends the task's steps up to the next turn. Returns whether the task has ended, either complete or failed."""
    try:
        for step in task.steps:
            channel.send(*pack_step(step))
            if isinstance(step, Turn):
                return False
        channel.send({"end": True})
    except ChannelClosed:
        raise
    except Exception as e:  # an error of one task must not end the other tasks
        channel.send_error(_error_of(e))
    return True


def _error_of(e: Exception) -> ProbingError:
    """Returns the error to send to the caller: a FormatError if damaged bytes of a file can cause ``e``."""
    if isinstance(e, ProbingError):
        return e
    if isinstance(e, MemoryError):
        return InternalError("the task needs more memory than the process may use")
    if isinstance(e, pa.ArrowException | OSError | ValueError | KeyError | TypeError | OverflowError):
        return FormatError(" ".join(str(e).split())[:MAX_TEXT] or type(e).__name__)
    return internal_error("maintenance", e)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except InternalError as e:
        raise SystemExit(e.message) from e
