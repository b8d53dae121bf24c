"""The process that runs or checks SQL: ``python -m probing.daemon.confined.sql_worker``, with a connection as fd 0.

A first message ``{"op": "warm", "role": ...}`` says which: ``gate`` checks (``sql_checker``), all others run.
It has no rights, limits on memory and CPU, and of all files only the store's, to read. A request is answered by
messages ``{"progress": fraction}`` where it was asked for that and takes long, ``{"part": "arrow"}`` with a piece of an
Arrow IPC stream each, then ``{"end": ...}`` or ``{"error": ...}``,
where ``last`` says that it answers no other. It ends when the other end hangs up, whatever it is doing: closing the
connection is the deadline.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from probing.api.errors import InternalError, ProbingError, QueryMemory
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import MemoryBound, confine, limit, stand_back
from probing.daemon.confined.serving import inherit, requests
from probing.daemon.ipc import Channel, ChannelClosed, Message

if TYPE_CHECKING:
    import duckdb

__all__ = ("main", "serve")

# Address space beside what DuckDB manages: the interpreter, libraries and thread stacks.
OVERHEAD_BYTES = 2 << 30
CPU_SECONDS = 3600
THREADS = 2
# Of the memory for a query; the rest is what DuckDB's allocator and Arrow take beside it.
DUCKDB_SHARE = 0.9
# A worker that kept more of it than this after a query is replaced by a fresh one.
WORN = 0.25
_log = logging.getLogger(__name__)


def main() -> None:
    config = Config.from_args(sys.argv[1:])
    memory = MemoryBound(config.query.memory_bytes)
    channel = inherit(lambda: _give_up_rights(config))
    with channel, suppress(ChannelClosed):
        first = channel.receive()
        if first.header.get("role") == "gate":
            from probing.daemon.confined import sql_checker

            sql_checker.serve(channel, memory)
        else:
            serve(channel, int(config.query.memory_bytes * DUCKDB_SHARE), memory, first)


def _give_up_rights(config: Config) -> None:
    threading.stack_size(256 * 1024)
    stand_back()
    limit(config.query.memory_bytes + OVERHEAD_BYTES, CPU_SECONDS)
    # One thread and no arena of its own: numpy's and Arrow's defaults take address space that is bounded here.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", ARROW_DEFAULT_MEMORY_POOL="system")
    # DuckDB's jemalloc gives memory back, rather than keep it mapped, where it counts against the bound.
    os.environ["DUCKDB_JE_MALLOC_CONF"] = "retain:false"
    confine([config.state_dir])


def serve(channel: Channel, memory_bytes: int, memory: MemoryBound, first: Message) -> None:
    """Answer queries, ``first`` among them, until the connection ends or too little memory is left.
    A database is made ahead of each query, for it alone."""
    # Imported late: what they start must start with the limits above. DuckDB wants pyarrow.dataset for Arrow rows.
    import pyarrow.dataset  # noqa: F401

    from probing.daemon.query import job

    ready = [job.new_connection(memory_bytes, THREADS)]

    def connect() -> duckdb.DuckDBPyConnection:
        return ready.pop() if ready else job.new_connection(memory_bytes, THREADS)

    memory.start()
    warm = first.header.get("op") == "warm"
    for request in chain(() if warm else (first,), requests(channel)):
        answer = _answer(channel, request, connect)
        worn = memory.used >= WORN
        channel.send({**answer, "last": worn})
        if worn:
            return
        if not ready:
            ready.append(connect())


def _answer(channel: Channel, request: Message, connect: Callable[[], duckdb.DuckDBPyConnection]) -> dict[str, object]:
    """What follows the parts of an answer."""
    from probing.daemon.query.job import Job, Outcome, run

    outcome = Outcome()
    try:
        job = Job.unpack(request.header, request.payload)
        run(
            job,
            connect,
            lambda data: channel.send({"part": "arrow"}, data),
            outcome,
            lambda fraction: channel.send({"progress": fraction}),
        )
    except ChannelClosed:
        raise
    except ProbingError as e:
        return {"error": e.to_dict(), "damaged": outcome.damaged}
    except MemoryError:
        return {"error": QueryMemory("the request needs more memory than a worker has").to_dict()}
    except Exception as e:  # what a query makes of the worker is that query's answer, and no more
        _log.exception("a query could not be answered")
        return {"error": InternalError(f"a worker failed: {type(e).__name__}").to_dict()}
    return {"end": outcome.to_dict()}


if __name__ == "__main__":
    main()
