"""Buffers parts of answers for slow readers, in bounded memory.

While its answer fits into the buffer, a worker need not wait for a slow reader. When the buffer is full, the query
rests: it keeps its worker, but its slot is free for other queries (``query/concurrency.py``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Any, Generic, TypeVar

from probing.api.errors import QueryError
from probing.daemon.query.caller import Caller

__all__ = ("Spool", "Spools")

# The maximum sizes of the buffer of one reader, and of all buffers, bytes. An empty buffer takes one part even beyond
# these limits.
EACH_BYTES = 8 << 20
ALL_BYTES = 32 << 20
# A query that has waited this long for its reader rests, s.
REST_S = 0.5
# The maximum numbers of resting queries: of one caller, and of all callers. Each keeps a worker and its memory.
MAX_RESTING_EACH = 6
MAX_RESTING = 12
T = TypeVar("T")


class Spools:
    """The memory and the resting queries that all spools of a service share. Thread-safe."""

    def __init__(self, all_bytes: int = ALL_BYTES) -> None:
        self._lock = threading.Lock()
        self._left = all_bytes
        self._resting: dict[Spool[Any], Caller] = {}

    def take(self, size: int) -> bool:
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size

    def rest(self, spool: Spool[Any], caller: Caller) -> None:
        """Marks ``spool`` as resting; if too many spools rest, evicts the one that has rested longest."""
        with self._lock:
            self._resting[spool] = caller
            of_caller = [one for one, owner in self._resting.items() if owner.key == caller.key]
            over = of_caller[: max(len(of_caller) - MAX_RESTING_EACH, 0)]
            over = over or list(self._resting)[: max(len(self._resting) - MAX_RESTING, 0)]
            for one in over:
                del self._resting[one]
        for one in over:
            one.evict()

    def wake(self, spool: Spool[Any]) -> None:
        with self._lock:
            self._resting.pop(spool, None)


class Spool(Generic[T]):
    """A queue of limited size from one thread to a coroutine."""

    def __init__(self, spools: Spools, caller: Caller) -> None:
        self._spools = spools
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._parts: deque[tuple[T, int, bool]] = deque()
        self._held = 0
        self._waits_since: float | None = None
        self._error: Exception | None = None
        self._finished = False
        self._closed = False
        self._news = asyncio.Event()
        self.evicted = asyncio.Event()

    @property
    def rests(self) -> bool:
        """Whether the query has waited at least REST_S for its caller to read."""
        since = self._waits_since
        return since is not None and time.monotonic() - since >= REST_S

    def put(self, part: T, size: int) -> None:
        """Adds a part, and waits until there is room. Raises QueryError once the spool is closed."""
        resting = False
        while not self._put(part, size):
            if self.rests and not resting:
                resting = True
                self._spools.rest(self, self._caller)
        if resting:
            self._spools.wake(self)
        self._set(self._news)

    def _put(self, part: T, size: int) -> bool:
        with self._changed:
            counted = self._room(size)
            if counted is None:
                self._waits_since = self._waits_since or time.monotonic()
                self._changed.wait(REST_S)
                return False
            self._waits_since = None
            self._parts.append((part, size, counted))
            self._held += size
            return True

    def finish(self) -> None:
        """Marks the end: no further part follows."""
        self._finished = True
        self._set(self._news)

    def fail(self, error: Exception) -> None:
        """Makes ``take`` raise ``error`` after the parts that were put."""
        self._error = error
        self._set(self._news)

    def evict(self) -> None:
        """Sets ``evicted``: this spool, whose reader does not read, makes room for other spools."""
        self._set(self.evicted)

    async def take(self) -> T | None:
        """Returns the next part; None after the last."""
        while True:
            self._news.clear()
            with self._changed:
                if self._parts:
                    return self._pop()
            if self._error is not None:
                raise self._error
            if self._finished:
                return None
            await self._news.wait()

    def close(self) -> None:
        """Drops the parts; from now on ``put`` raises."""
        with self._changed:
            self._closed = True
            while self._parts:
                self._pop()
            self._changed.notify_all()
        self._spools.wake(self)

    def _pop(self) -> T:
        part, size, counted = self._parts.popleft()
        self._held -= size
        if counted:
            self._spools.give(size)
        self._changed.notify_all()
        return part

    def _room(self, size: int) -> bool | None:
        """Returns whether a part of ``size`` counts towards the shared limit; None if there is no room for it."""
        if self._closed:
            raise QueryError("the query was cancelled: nobody waits for its answer")
        if self._held + size <= EACH_BYTES and self._spools.take(size):
            return True
        return None if self._parts else False

    def _set(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            return  # the event loop is closed, since the service ends
