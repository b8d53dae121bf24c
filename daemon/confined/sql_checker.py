"""A worker that checks queries and does not run them. Parsing hostile text can take long, so the worker may be killed
at any time.

The payload of a request ``{"op": "check"}`` is JSON: ``statements``, ``now_ns``, and optionally ``jobs`` (the only jobs
whose rows the caller may see), ``users`` (tables of users) and ``views``. If a statement needs ``users`` or ``views``
and the request lacks them, the answer is ``{"end": {"needs": "users" | "views"}}``. Otherwise the answer is ``{"end":
{}}`` with a JSON list as payload: for each statement its checked form or its ``error``. The answer to a wrong request
is ``{"error": ...}``.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Mapping
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

# The limit of CPU time for a request, s. A query of ten thousand syntax nodes through three views takes a tenth of this
# time.
CPU_S = 3.0
_log = logging.getLogger(__name__)


class _Needed(Exception):
    """Raised when a statement needs tables or views that the request lacks; the argument is "users" or "views"."""


def serve(channel: Channel, memory: MemoryBound) -> None:
    """Answers requests until the connection ends. A request that takes more than CPU_S of CPU time ends the process."""
    memory.start()
    channel.send({"warm": True})
    serving.serve(channel, _answer, _error_of)


def _answer(request: Message) -> Message:
    # When the timer expires, the kernel kills this process.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        checked = _checked_all(json.loads(request.payload))
        return Message({"end": {}}, json.dumps(checked, separators=(",", ":")).encode())
    except _Needed as e:
        return Message({"end": {"needs": str(e)}})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _error_of(error: Exception) -> ProbingError:
    if isinstance(error, MemoryError):
        return QueryMemory("checking the query needs more memory than a worker has")
    _log.error("a query could not be checked", exc_info=error)
    return InternalError(f"the query could not be checked: {type(error).__name__}")


def _checked_all(asked: Mapping[str, Any]) -> list[dict[str, object]]:
    def users() -> dict[str, Table]:
        if "users" not in asked:
            raise _Needed("users")
        return {table.name: table for table in map(user_table_from, asked["users"])}

    def views() -> dict[str, View]:
        if "views" not in asked:
            raise _Needed("views")
        return {view["name"]: View(columns=(), **view) for view in asked["views"]}

    jobs = asked.get("jobs")
    return [_checked(str(sql), int(asked["now_ns"]), users, views, jobs) for sql in asked["statements"]]


def _checked(
    sql: str,
    now_ns: int,
    users: Callable[[], dict[str, Table]],
    views: Callable[[], dict[str, View]],
    jobs: list[str] | None,
) -> dict[str, object]:
    try:
        found = check(sql, now_ns, users, views, jobs)
    except _Needed:
        raise
    except ProbingError as e:
        return {"error": e.to_dict()}
    except Exception as e:  # a statement that fails gets the error as its answer
        return {"error": _error_of(e).to_dict()}
    return {
        "sql": found.sql,
        "needs": {name: need.packed() for name, need in found.needs.items()},
        "users": list(found.users),
        "warnings": found.warnings,
        "columns": None if found.columns is None else sorted(found.columns),
    }
