"""The process that runs or checks SQL: ``python -m probing.daemon.confined.sql_worker``, with a connection as fd 0.

The first message ``{"op": "warm", "role": ...}`` chooses the task: ``gate`` checks queries (``sql_checker``), any other
role runs them. The answer is ``{"warm": true}`` once the process has started. The process has no rights, has limits on
memory and CPU, and may read only the store's files.

The answer to a request has, for each statement in turn, messages ``{"part": "arrow"}``, each with a piece of an Arrow
IPC stream, and then ``{"statement": {"rows": N}}`` or ``{"statement": {"error": ...}}``; it ends with ``{"end": ...}``.
The answer to a wrong request is ``{"error": ...}``. If the request wants progress, messages ``{"progress": fraction}``
come before the parts of a long statement. If ``last`` in the last message is true, the worker answers no other request.

Callers enforce their deadline by closing the connection: the process then ends at once.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import ExitStack, suppress
from itertools import chain
from typing import TYPE_CHECKING

from probing.api.errors import InternalError, ProbingError, QueryMemory
from probing.api.numpy_import import hide_numpy
from probing.daemon.config import Config
from probing.daemon.confined.sandbox import MemoryBound, confine, limit, stand_back
from probing.daemon.confined.serving import inherit, requests
from probing.daemon.ipc import Channel, ChannelClosed, Message

if TYPE_CHECKING:
    from probing.daemon.query.database import Instance
    from probing.daemon.query.job import Database

__all__ = ("main", "serve")

# Address space in addition to the memory for a query: the interpreter, libraries and thread stacks.
OVERHEAD_BYTES = 2 << 30
CPU_SECONDS = 3600
THREADS = 2
# DuckDB's share of the memory for a query; DuckDB's allocator and Arrow take the rest.
DUCKDB_SHARE = 0.9
# A worker is replaced if it still uses more than this share of its memory after a query.
WORN = 0.25
_log = logging.getLogger(__name__)


def main() -> None:
    config = Config.from_args(sys.argv[1:])
    memory = MemoryBound(config.query.memory_bytes)
    channel = inherit(lambda: _give_up_rights(config))
    with channel, suppress(ChannelClosed):
        first = channel.receive()
        # No query needs numpy.
        hide_numpy()
        if first.header.get("role") == "gate":
            from probing.daemon.confined import sql_checker

            sql_checker.serve(channel, memory)
        else:
            serve(channel, int(config.query.memory_bytes * DUCKDB_SHARE), memory, first)


def _give_up_rights(config: Config) -> None:
    threading.stack_size(256 * 1024)
    stand_back()
    limit(config.query.memory_bytes + OVERHEAD_BYTES, CPU_SECONDS)
    # Arrow's own allocator would reserve address space, which is limited in this process.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    # Otherwise jemalloc keeps freed memory mapped, which counts against the limit.
    os.environ["DUCKDB_JE_MALLOC_CONF"] = "retain:false"
    confine([config.state_dir])


def serve(channel: Channel, memory_bytes: int, memory: MemoryBound, first: Message) -> None:
    """Answers ``first`` and further requests until the connection ends or too little memory is left."""
    # Imported late, so that the threads of these modules start with the limits that ``_give_up_rights`` sets.
    from probing.daemon.query.database import Instance

    instance = Instance(memory_bytes, THREADS)
    instance.prepare()
    memory.start()
    warm = first.header.get("op") == "warm"
    if warm:
        channel.send({"warm": True})
    for request in chain(() if warm else (first,), requests(channel)):
        with ExitStack() as used:
            answer = _answer(channel, request, instance, used)
            worn = memory.used >= WORN
            # The answer is sent first, because closing the database takes some ms.
            channel.send({**answer, "last": worn})
        if worn:
            return
        instance.prepare()


def _answer(channel: Channel, request: Message, instance: Instance, used: ExitStack) -> dict[str, object]:
    """Sends the answers to all statements, and returns the last message. ``used`` closes the database."""
    from probing.daemon.query.job import Database, Job, Outcome

    outcome = Outcome()
    try:
        job = Job.unpack(request.header, request.payload)
        database = Database(job, instance, outcome)
    except Exception as e:  # a request must not end the worker
        return {"error": _failure(e)}
    used.callback(database.close)
    for number, sql in enumerate(job.statements):
        channel.send({"statement": _statement(channel, database, sql, number, len(job.statements))})
    return {"end": outcome.to_dict()}


def _statement(channel: Channel, database: Database, sql: str, number: int, count: int) -> dict[str, object]:
    def tell(fraction: float) -> None:
        channel.send({"progress": fraction if fraction < 0 else (number + fraction) / count})

    if database.needs_no_run(number):
        return {"rows": 0}
    try:
        return {"rows": database.answer(sql, lambda data: channel.send({"part": "arrow"}, data), tell)}
    except ChannelClosed:
        raise
    except Exception as e:  # a statement that fails gets the error as its answer
        return {"error": _failure(e)}


def _failure(error: Exception) -> dict[str, str]:
    if isinstance(error, ProbingError):
        return error.to_dict()
    if isinstance(error, MemoryError):
        return QueryMemory("the request needs more memory than a worker has").to_dict()
    _log.error("a query could not be answered", exc_info=error)
    return InternalError(f"a worker failed: {type(error).__name__}").to_dict()


if __name__ == "__main__":
    main()
    # The process ends at once, as when the connection closes. An orderly exit would log DuckDB's objects as leaks.
    os._exit(0)
