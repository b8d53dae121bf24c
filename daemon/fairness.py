"""Shares limited capacity fairly among users: a user with many processes displaces only its own processes."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Any, Generic, TypeVar

__all__ = ("FairExecutor", "Turns", "crowding", "in_turn")

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hashable)
_NONE = object()


def crowding(owners: Iterable[_H]) -> _H:
    """Returns the owner that occurs most often in ``owners``; on a tie, the first. Raises ValueError without owners."""
    counts = Counter(owners)
    return max(counts, key=counts.__getitem__)


def in_turn(items: Iterable[_T], owner: Callable[[_T], Hashable]) -> list[_T]:
    """Returns the items in an order in which the owners take turns, so that a list of the first N items is fair.

    The items of each owner stay in their order.
    """
    of_owner: dict[Hashable, list[_T]] = {}
    for item in items:
        of_owner.setdefault(owner(item), []).append(item)
    turns = chain.from_iterable(zip_longest(*of_owner.values(), fillvalue=_NONE))
    return [item for item in turns if item is not _NONE]  # type: ignore[misc]


class Turns(Generic[_H]):
    """Decides which owner is served next by a resource that serves one owner at a time (start-time fair queueing, Goyal
    1996).

    An owner that asks for the first time, or again after a pause, is served next. Unused turns are not saved up.
    """

    def __init__(self) -> None:
        self._now = 0
        self._next: dict[_H, int] = {}

    def of(self, owner: _H) -> int:
        """Returns the number of the turn of ``owner``; the owner with the lowest number is served next."""
        return max(self._next.get(owner, 0), self._now)

    def took(self, owner: _H) -> None:
        """Notes that ``owner`` was served once."""
        self._now = self.of(owner)
        self._next = {other: turn for other, turn in self._next.items() if turn > self._now}
        self._next[owner] = self._now + 1


class FairExecutor:
    """Runs calls in ``size`` threads; the owners of the waiting calls take turns. ``submit`` is thread-safe."""

    def __init__(self, size: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._turns: Turns[Hashable] = Turns()

    def submit(self, owner: Hashable, call: Callable[..., _T], *values: Any) -> Future[_T]:
        """Queues a call of ``owner``. Returns the future of its result."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*values))
            except BaseException as e:
                future.set_exception(e)

        with self._lock:
            self._waiting.setdefault(owner, deque()).append(run)
        self._threads.submit(self._next)
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Drops the waiting calls, and waits for the running ones."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            owner = min(self._waiting, key=self._turns.of)
            self._turns.took(owner)
            run = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
        run()
