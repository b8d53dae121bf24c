"""Has queries checked in worker processes, which are killed at the deadline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from probing.api.errors import InternalError, error_from
from probing.api.tables import Table
from probing.api.tables.schema import View
from probing.api.tables.user import user_table_to
from probing.daemon.query.caller import Caller
from probing.daemon.query.concurrency import Slots
from probing.daemon.query.gate import Checked
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.pruning import Range

__all__ = ("Gatekeeper",)

# Checks at once. One takes a millisecond or two.
CONCURRENT = 2


class Gatekeeper:
    """Checks as ``gate.check`` does; safe for many threads."""

    def __init__(self, pool: WorkerPool) -> None:
        """``pool``: workers of the role ``gate``."""
        self._pool = pool
        self._slots = Slots(CONCURRENT)

    def check(
        self,
        sql: str,
        now_ns: int,
        users: Callable[[], Mapping[str, Table]],
        views: Callable[[], Mapping[str, View]],
        *,
        deadline: float,
        cancelled: Callable[[], bool],
        caller: Caller,
    ) -> Checked:
        """``deadline``: on time.monotonic(). Raises QueryRejected, also where the check takes too long; QueryTimeout,
        and what ``users`` and ``views`` raise."""
        asked: dict[str, Any] = {"sql": sql, "now_ns": now_ns}
        known: Mapping[str, Table] = {}
        while True:
            with self._slots.taken(deadline, cancelled, caller):
                payload = json.dumps(asked, separators=(",", ":")).encode()
                (message,) = self._pool.run({"op": "check"}, payload, deadline=deadline, cancelled=cancelled)
            if error := message.header.get("error"):
                raise error_from(str(error.get("kind")), str(error.get("message")), str(error.get("hint", "")))
            needs = message.header["end"].get("needs")
            if needs is None:
                return _checked(message.payload, known)
            if needs in asked:
                raise InternalError("the gate asks for what it has")
            if needs == "users":
                known = users()
                asked["users"] = [user_table_to(table) for table in known.values()]
            else:
                asked["views"] = [_to_wire(view) for view in views().values()]


def _to_wire(view: View) -> dict[str, str]:
    return {"name": view.name, "doc": view.doc, "sql": view.sql, "problem": view.problem}


def _checked(payload: bytes, known: Mapping[str, Table]) -> Checked:
    try:
        found = json.loads(payload)
        return Checked(
            str(found["sql"]),
            tuple(map(str, found["tables"])),
            {str(name): Range(times["low"], times["high"]) for name, times in found["ranges"].items()},
            {str(name): known[name] for name in found["users"]},
            {str(name): None if jobs is None else frozenset(jobs) for name, jobs in found["jobs"].items()},
            tuple(map(str, found["warnings"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InternalError("the gate's answer makes no sense") from e
