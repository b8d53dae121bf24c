"""Sends statements to worker processes with the role ``gate``, which check the statements. A worker that has not
answered at the deadline is killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from probing.api.errors import InternalError, ProbingError
from probing.api.tables import Table
from probing.api.tables.schema import View
from probing.api.tables.user import user_table_to
from probing.api.typed import typed
from probing.daemon.ipc import error_of
from probing.daemon.query.answer import Checked
from probing.daemon.query.caller import Caller
from probing.daemon.query.concurrency import QuerySlots
from probing.daemon.query.pool import WorkerPool
from probing.daemon.store.needs import Need

__all__ = ("Gatekeeper",)

# The maximum number of checks at the same time. A check takes a millisecond or two.
CONCURRENT = 2


class Gatekeeper:
    """Runs ``gate.check`` in workers. Thread-safe."""

    def __init__(self, pool: WorkerPool) -> None:
        """Makes the gatekeeper. ``pool``: workers of the role ``gate``."""
        self._pool = pool
        self._slots = QuerySlots(CONCURRENT)

    def check(
        self,
        statements: Sequence[str],
        now_ns: int,
        users: Callable[[], Mapping[str, Table]],
        views: Callable[[], Mapping[str, View]],
        *,
        deadline: float,
        cancelled: Callable[[], bool],
        caller: Caller,
    ) -> list[Checked | ProbingError]:
        """Returns the result, or the error, of ``gate.check`` for each statement. ``deadline`` is on time.monotonic().

        Raises QueryRejected if the check takes too long, QueryTimeout, and the errors of ``users`` and ``views``.
        """
        asked: dict[str, object] = {"statements": list(statements), "now_ns": now_ns}
        if caller.jobs is not None:
            asked["jobs"] = sorted(caller.jobs)
        known: Mapping[str, Table] = {}
        while True:
            with self._slots.taken(deadline, cancelled, caller):
                payload = json.dumps(asked, separators=(",", ":")).encode()
                (message,) = self._pool.run({"op": "check"}, payload, deadline=deadline, cancelled=cancelled)
            if error := message.header.get("error"):
                raise error_of(error)
            needs = message.header["end"].get("needs")
            if needs is None:
                return _answers(message.payload, known, len(statements))
            if needs in asked:
                raise InternalError("the gate requests tables or views that it already has")
            if needs == "users":
                known = users()
                asked["users"] = [user_table_to(table) for table in known.values()]
            else:
                asked["views"] = [_to_wire(view) for view in views().values()]


def _to_wire(view: View) -> dict[str, str]:
    return {"name": view.name, "doc": view.doc, "sql": view.sql, "problem": view.problem}


def _answers(payload: bytes, known: Mapping[str, Table], count: int) -> list[Checked | ProbingError]:
    try:
        found = [error_of(one["error"]) if "error" in one else _checked(one, known) for one in json.loads(payload)]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InternalError("the gate's answer is malformed") from e
    if len(found) != count:
        raise InternalError("the gate did not answer every statement")
    return found


class _Answer(TypedDict):
    sql: str
    needs: dict[str, Need]
    users: list[str]
    warnings: tuple[str, ...]
    columns: frozenset[str] | None


def _checked(answer: object, known: Mapping[str, Table]) -> Checked:
    found = typed(_Answer, answer)
    users = {name: known[name] for name in found["users"]}
    return Checked(found["sql"], found["needs"], users, found["warnings"], found["columns"])
