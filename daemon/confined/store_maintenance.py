"""The process that seals and merges for the collector: it has no rights at all, writes no file, and can be killed.

``python -m probing.daemon.confined.store_maintenance`` with a connection as descriptor 0. Requests:

* ``ping``: ``{"pid"}``.
* ``give`` (``job``, descriptors): files of the job with this number, in order. Not answered.
* ``begin`` (``job``, ``what``, ``fields``): a job of ``jobs.JOBS`` over these files. Not answered.
* ``next`` (``job``): its steps up to the next turn, or to ``{"end"}``.
* ``drop`` (``job``): not answered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa

from probing.api.errors import InternalError, ProbingError, UsageError
from probing.daemon.confined.sandbox import confine, limit, stand_back
from probing.daemon.confined.serving import inherit, requests
from probing.daemon.confined.store_errors import format_error
from probing.daemon.ipc import Channel, ChannelClosed, Message
from probing.daemon.store.jobs.steps import JOBS, Source, Step

__all__ = ("main",)

MEMORY_BYTES = 3 << 30
# For its whole life, which the collector keeps short.
CPU_SECONDS = 3600
MAX_FILES = 256


@dataclass
class _Job:
    files: list[Source] = field(default_factory=list)
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))

    def close(self) -> None:
        self.steps = iter(())
        for file in self.files:
            file.close()
        pa.default_memory_pool().release_unused()


def main() -> int:
    """Serve the connection that is descriptor 0 until it closes."""
    channel, jobs = inherit(_give_up_rights), dict[int, _Job]()
    with suppress(ChannelClosed):
        for request in requests(channel):
            _take(channel, request, jobs)
    return 0


def _give_up_rights() -> None:
    # Not at the processor: the log must not grow faster than it is sealed.
    stand_back(niceness=0)
    limit(MEMORY_BYTES, CPU_SECONDS)
    # Imported before the files are out of reach.
    import pyarrow.parquet  # noqa: F401

    confine(())


def _take(channel: Channel, request: Message, jobs: dict[int, _Job]) -> None:
    op, header = request.header.get("op"), request.header
    if op == "ping":
        channel.send({"pid": os.getpid()})
        return
    number = int(header["job"])
    if op == "give":
        job = jobs.setdefault(number, _Job())
        job.files += [os.fdopen(request.take_fd(), "rb") for _ in range(len(request.fds))]
        if sum(len(other.files) for other in jobs.values()) > MAX_FILES:
            raise InternalError(f"more than {MAX_FILES} files")
    elif op == "begin":
        job = jobs.setdefault(number, _Job())
        job.steps = JOBS[header["what"]](job.files, header["fields"])
    elif op == "drop":
        jobs.pop(number, _Job()).close()
    elif op == "next":
        if _next(channel, jobs[number]):
            jobs.pop(number).close()
    else:
        raise UsageError(f"maintenance knows no request {op!r}")


def _next(channel: Channel, job: _Job) -> bool:
    """True when the job has ended, well or not."""
    try:
        for header, payload in job.steps:
            channel.send(header, payload)
            if "turn" in header:
                return False
        channel.send({"end": True})
    except ChannelClosed:
        raise
    except MemoryError:
        channel.send_error(InternalError("it needs more memory than there is for it"))
    except ProbingError as e:
        channel.send_error(e)
    except Exception as e:
        if not (error := format_error(e)):
            raise
        channel.send_error(error)
    return True


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except InternalError as e:
        raise SystemExit(e.message) from e
