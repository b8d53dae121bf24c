"""A worker that checks queries and runs none: parsing is where their text can make work, and this can be killed.

A request ``{"op": "check"}`` has as payload JSON with ``sql``, ``now_ns``, and ``users`` and ``views`` once they were
asked for. It is answered by ``{"end": {"needs": "users" | "views"}}`` where the query needs what it does not have, else
by ``{"end": {}}`` with what was checked as payload, or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from probing.api.errors import InternalError, ProbingError, QueryMemory
from probing.api.tables import Table
from probing.api.tables.schema import View
from probing.api.tables.user import user_table_from
from probing.daemon.confined import serving
from probing.daemon.confined.sandbox import MemoryBound
from probing.daemon.ipc import Channel, Message
from probing.daemon.query.gate import check

__all__ = ("CPU_S", "serve")

# Processor time for one query; ten thousand nodes through three views take a tenth of it.
CPU_S = 3.0
_log = logging.getLogger(__name__)


class _Needed(Exception):
    """The query names what was not sent along."""


def serve(channel: Channel, memory: MemoryBound) -> None:
    """Answer requests until the connection ends. A query that takes more than CPU_S ends the process."""
    memory.start()
    serving.serve(channel, _answer, _error_of)


def _answer(request: Message) -> Message:
    # At its end the kernel kills, whatever this process is doing.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        return Message({"end": {}}, _checked(json.loads(request.payload)))
    except _Needed as e:
        return Message({"end": {"needs": str(e)}})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _error_of(e: Exception) -> ProbingError:
    if isinstance(e, MemoryError):
        return QueryMemory("checking the query needs more memory than a worker has")
    _log.error("a query could not be checked", exc_info=e)
    return InternalError(f"the gate failed: {type(e).__name__}")


def _checked(asked: Mapping[str, Any]) -> bytes:
    def users() -> dict[str, Table]:
        if "users" not in asked:
            raise _Needed("users")
        return {table.name: table for table in map(user_table_from, asked["users"])}

    def views() -> dict[str, View]:
        if "views" not in asked:
            raise _Needed("views")
        return {view["name"]: View(columns=(), **view) for view in asked["views"]}

    found = check(str(asked["sql"]), int(asked["now_ns"]), users, views)
    fields = {
        "sql": found.sql,
        "tables": found.tables,
        "ranges": {name: asdict(times) for name, times in found.ranges.items()},
        "users": list(found.users),
        "jobs": {name: None if jobs is None else sorted(jobs) for name, jobs in found.jobs.items()},
        "warnings": found.warnings,
    }
    return json.dumps(fields, separators=(",", ":")).encode()
