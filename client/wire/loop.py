"""The event loop of this process in which nodes are asked: one thread, since gRPC serves one loop well.

Code of gRPC runs in that thread alone. KeyboardInterrupt reaches the main thread between any two instructions: within
gRPC it would leave a lock held, or a call that is never drained. Here it ends a wait, and with it the work in the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from probing.api.errors import PeerError

__all__ = ("Work", "in_loop", "wait")

T = TypeVar("T")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ask nodes", daemon=True).start()
        return _loop


def in_loop(step: Callable[[], object]) -> None:
    """Calls ``step`` in the loop, soon."""
    _running().call_soon_threadsafe(step)


class Work(Generic[T]):
    """A coroutine that runs in the loop from now on."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._task: asyncio.Task[T] | None = None
        # Written in C: an interrupt leaves no lock of it held.
        self._ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        in_loop(lambda: self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        # Where nobody waits any more, its error is of no interest: asyncio would write it to stderr.
        if not task.cancelled():
            task.exception()
        self._ended.put(task)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end, once; returns or raises what the work does. An error ends the work, as Ctrl-C and
        TimeoutError after ``timeout`` seconds are. Raises PeerError where somebody else has ended it."""
        try:
            task = self._ended.get(timeout=timeout)
        except Empty:
            self.cancel()
            raise TimeoutError from None
        except BaseException:
            self.cancel()
            raise
        if task.cancelled():
            raise PeerError("nobody waits for the answer any more")
        return task.result()

    def cancel(self) -> None:
        """Ends the work."""
        in_loop(lambda: self._task is not None and self._task.cancel())


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` in the loop; returns its result or raises its error. Ctrl-C ends the wait and the work.

    Must not be called from the loop's own thread.
    """
    return Work(work).result()
