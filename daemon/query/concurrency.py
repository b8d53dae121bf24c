"""Limits the queries that run in SQL workers at the same time, so that short queries need not wait for long ones.

If no slot is free, a query waits for a slot until its deadline. Before that ``service/answering.py`` decides whether a
call may wait at all: it limits the calls and threads of each caller, and refuses further calls at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from probing.api.errors import QueryTimeout
from probing.daemon.query.caller import GLANCE_S, NOBODY, Caller, stop_if

__all__ = ("QuerySlot", "QuerySlots")

# If the caller of a query does not read the answer, the query keeps its slot for this many seconds after its deadline.
GRACE_S = 1.0
# A query that has run for longer than this is slow, s.
SLOW_S = 3.0
# The number of slots that are reserved for root's queries.
ROOTS = 2


@dataclass(eq=False, slots=True)
class QuerySlot:
    """The slot of a query. ``deadline`` is on time.monotonic(). ``cancelled`` returns whether the caller went away.
    ``resting`` returns whether the query only waits for its caller to read. ``since``: when it got the slot."""

    deadline: float
    cancelled: Callable[[], bool]
    caller: Caller = NOBODY
    resting: Callable[[], bool] = lambda: False
    large: bool = False
    since: float = field(default_factory=time.monotonic)


class QuerySlots:
    """Gives slots to queries. At most ``most`` queries run at the same time, apart from the further slots below. If
    ``most`` is above 1, one slot is never used by a large query. Thread-safe.

    The first waiting query that fits runs next. ``most`` further slots are only for callers whose running queries are
    all slow, so that their next queries need not wait for the slow queries. A caller gets such a slot only while its
    queries use less than three quarters of the 2 * ``most`` slots. ROOTS further slots are reserved for root. A resting
    query uses no slot.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_large = max(most - 1, 1)
        self._changed = threading.Condition()
        self._held: list[QuerySlot] = []
        self._waiting: list[QuerySlot] = []

    @property
    def held(self) -> int:
        """Returns the number of slots in use."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Returns the number of queries that wait for a slot."""
        return len(self._waiting)

    @contextmanager
    def taken(
        self,
        deadline: float,
        cancelled: Callable[[], bool],
        caller: Caller = NOBODY,
        resting: Callable[[], bool] = lambda: False,
    ) -> Iterator[QuerySlot]:
        """Waits for a slot for a small query, and yields it. Raises QueryTimeout, or QueryError when the caller went
        away."""
        slot = QuerySlot(deadline, cancelled, caller, resting)
        self._wait(slot)
        try:
            yield slot
        finally:
            self._leave(slot)

    def grow(self, slot: QuerySlot) -> None:
        """Makes the query in ``slot`` a large query. Waits until a large query fits; other queries may overtake it."""
        self._leave(slot)
        slot.large = True
        self._wait(slot)

    def _wait(self, slot: QuerySlot) -> None:
        with self._changed:
            self._waiting.append(slot)
            try:
                while self._first_that_fits() is not slot:
                    stop_if(slot.cancelled)
                    if time.monotonic() >= slot.deadline:
                        hint = "ask again, or end the other queries"
                        raise QueryTimeout("other queries kept the node busy", hint=hint)
                    self._changed.wait(GLANCE_S)
                slot.since = time.monotonic()
                self._held.append(slot)
            finally:
                self._waiting.remove(slot)
                self._changed.notify_all()

    def _leave(self, slot: QuerySlot) -> None:
        with self._changed:
            if slot in self._held:
                self._held.remove(slot)
            self._changed.notify_all()

    def _first_that_fits(self) -> QuerySlot | None:
        now = time.monotonic()
        running = [slot for slot in self._held if slot.deadline + GRACE_S > now and not slot.resting()]
        return next((slot for slot in self._waiting if self._fits(slot, running, now)), None)

    def _fits(self, slot: QuerySlot, running: list[QuerySlot], now: float) -> bool:
        large = sum(other.large for other in running)
        if len(running) < self._most and not (slot.large and large >= self._most_large):
            return True
        of_caller = [other for other in running if other.caller.key == slot.caller.key]
        if any(other.since + SLOW_S > now for other in of_caller):
            return False
        if slot.large and (large >= 2 * self._most_large or any(other.large for other in of_caller)):
            return False
        if slot.caller.reserved:
            return len(running) < 2 * self._most + ROOTS
        return len(running) < 2 * self._most and len(of_caller) < max(2 * self._most * 3 // 4, 1)
