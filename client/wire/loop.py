"""The event loop in which this process asks nodes. It runs in one thread, because gRPC works best with one loop.

Code of gRPC runs only in that thread. KeyboardInterrupt can reach the main thread between any two instructions; within
gRPC it could leave a lock held or a call never drained. With this loop it only ends the wait of the main thread, which
then cancels the work in the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from probing.api.errors import PeerError

__all__ = ("Waits", "Work", "begin", "in_loop", "wait")

T = TypeVar("T")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread = threading.local()
_NOBODY = "nobody waits for the answer any more"


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ask nodes", daemon=True).start()
        return _loop


def in_loop(step: Callable[[], object]) -> None:
    """Schedules ``step`` to be called in the loop."""
    _running().call_soon_threadsafe(step)


class Work(Generic[T]):
    """A coroutine that begins to run in the loop at once."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._task: asyncio.Task[T] | None = None
        # SimpleQueue is written in C, so an interrupt cannot leave its lock held.
        self._ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        in_loop(lambda: self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        # If nobody waits any more, asyncio would write the error to stderr; reading it here prevents that.
        if not task.cancelled():
            task.exception()
        self._ended.put(task)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end of the work; returns its result or raises its error. May be called once. Ctrl-C, another
        error, and TimeoutError after ``timeout`` seconds end the work. Raises PeerError if ``cancel`` ended it."""
        try:
            task = self._ended.get(timeout=timeout)
        except Empty:
            self.cancel()
            raise TimeoutError from None
        except BaseException:
            self.cancel()
            raise
        if task.cancelled():
            raise PeerError(_NOBODY)
        return task.result()

    def cancel(self) -> None:
        """Ends the work."""
        in_loop(lambda: self._task is not None and self._task.cancel())


class Waits:
    """Lets any thread end the waits of one thread. The waiting thread enters this context manager. After ``end`` its
    waits raise PeerError, and the work that it waits for is cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: Work[Any] | None = None
        self._ended = False

    def __enter__(self) -> None:
        _thread.waits = self

    def __exit__(self, *_: object) -> None:
        _thread.waits = None

    def end(self) -> None:
        with self._lock:
            self._ended = True
            work = self._work
        if work is not None:
            work.cancel()

    def begin(self, work: Coroutine[Any, Any, T]) -> Work[T]:
        """Begins ``work``. Raises PeerError after ``end``."""
        with self._lock:
            if self._ended:
                work.close()
                raise PeerError(_NOBODY)
            begun = self._work = Work(work)
        return begun


def begin(work: Coroutine[Any, Any, T]) -> Work[T]:
    """Begins ``work``, whose result this thread will wait for. Raises PeerError if the ``Waits`` of this thread have
    ended."""
    waits: Waits | None = getattr(_thread, "waits", None)
    return Work(work) if waits is None else waits.begin(work)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` in the loop; returns its result or raises its error. Ctrl-C, and ``end`` of the thread's ``Waits``,
    end the wait and the work.

    Must not be called in the thread of the loop.
    """
    return begin(work).result()
