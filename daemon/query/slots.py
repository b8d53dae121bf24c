"""How many queries run at once, so that small ones need not wait until large ones have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from probing.api.errors import QueryTimeout
from probing.daemon.query.waiting import GLANCE_S, stop_if

__all__ = ("Slot", "Slots")

# A query whose caller does not take its answer keeps others waiting for so long after its own deadline, s.
GRACE_S = 1.0


@dataclass(eq=False)
class Slot:
    """A query's place. ``deadline`` on time.monotonic(); ``cancelled``: its caller went away."""

    deadline: float
    cancelled: Callable[[], bool]
    large: bool = False


class Slots:
    """``most`` queries at once, of which all but one may be large; of those that wait, the first that fits goes first.

    Safe for many threads.
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
    def taken(self, deadline: float, cancelled: Callable[[], bool]) -> Iterator[Slot]:
        """A place, as a small query at first. Raises QueryTimeout, or QueryError when the caller went away."""
        slot = Slot(deadline, cancelled)
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
        running = [slot for slot in self._held if slot.deadline + GRACE_S > now]
        large = sum(slot.large for slot in running)
        if len(running) >= self._most:
            return None
        return next((slot for slot in self._waiting if not slot.large or large < self._most_large), None)
