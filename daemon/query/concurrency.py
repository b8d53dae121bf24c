"""How many queries run at once, so that small ones need not wait for large ones, nor anybody for a stranger's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from probing.api.errors import QueryTimeout
from probing.daemon.query.caller import NOBODY, Caller
from probing.daemon.query.cancellation import GLANCE_S, stop_if

__all__ = ("Slot", "Slots")

# A query whose caller does not take its answer keeps others waiting for so long after its own deadline, s.
GRACE_S = 1.0
# A query that runs for longer is a slow one, s.
SLOW_S = 3.0
# Places that only root's queries get.
ROOTS = 2


@dataclass(eq=False)
class Slot:
    """A query's place. ``deadline`` on time.monotonic(); ``cancelled``: its caller went away; ``resting``: it waits for
    its caller to take its answer."""

    deadline: float
    cancelled: Callable[[], bool]
    caller: Caller = NOBODY
    resting: Callable[[], bool] = lambda: False
    large: bool = False
    since: float = field(default_factory=time.monotonic)


class Slots:
    """``most`` queries at once, of which all but one may be large; of those that wait, the first that fits goes first.

    As many again are for callers all of whose queries have become slow ones, so that those do not keep others waiting
    to their end; one caller has at most three quarters of all, and two more are root's. A query that rests does not
    count. Safe for many threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_large = max(most - 1, 1)
        self._changed = threading.Condition()
        self._held: list[Slot] = []
        self._waiting: list[Slot] = []

    @property
    def held(self) -> int:
        return len(self._held)

    @contextmanager
    def taken(
        self,
        deadline: float,
        cancelled: Callable[[], bool],
        caller: Caller = NOBODY,
        resting: Callable[[], bool] = lambda: False,
    ) -> Iterator[Slot]:
        """A place, as a small query at first. Raises QueryTimeout, or QueryError when the caller went away."""
        slot = Slot(deadline, cancelled, caller, resting)
        self._wait(slot)
        try:
            yield slot
        finally:
            self._leave(slot)

    def grow(self, slot: Slot) -> None:
        """The query in ``slot`` is a large one; others may go before it while there is no place for such a one."""
        self._leave(slot)
        slot.large = True
        self._wait(slot)

    def _wait(self, slot: Slot) -> None:
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

    def _leave(self, slot: Slot) -> None:
        with self._changed:
            if slot in self._held:
                self._held.remove(slot)
            self._changed.notify_all()

    def _first_that_fits(self) -> Slot | None:
        now = time.monotonic()
        running = [slot for slot in self._held if slot.deadline + GRACE_S > now and not slot.resting()]
        return next((slot for slot in self._waiting if self._fits(slot, running, now)), None)

    def _fits(self, slot: Slot, running: list[Slot], now: float) -> bool:
        large = sum(one.large for one in running)
        if len(running) < self._most and not (slot.large and large >= self._most_large):
            return True
        own = [one for one in running if one.caller.key == slot.caller.key]
        if any(one.since + SLOW_S > now for one in own):
            return False
        if slot.large and (large >= 2 * self._most_large or any(one.large for one in own)):
            return False
        if slot.caller.reserved:
            return len(running) < 2 * self._most + ROOTS
        return len(running) < 2 * self._most and len(own) < max(2 * self._most * 3 // 4, 1)
