"""A thread that repeats the same work, and that can be paused, hurried and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from probing.api.errors import InternalError, ProbingError

__all__ = ("Repeater",)

_LEAST_S = 0.1


class Repeater:
    """Calls ``work`` every ``interval`` seconds in a daemon thread. ``failed`` is called with an error that ``work``
    raises.
    """

    def __init__(
        self, name: str, work: Callable[[], None], interval: float, failed: Callable[[ProbingError], None]
    ) -> None:
        self._work = work
        self._interval = interval
        self._failed = failed
        self._ended = False
        self._paused = False
        self._changed = threading.Condition()
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Lets the thread end after the current work, without waiting for it."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Pauses the thread, or if ``paused`` is False resumes it. A paused thread starts no work."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def every(self, interval: float) -> None:
        """Sets the seconds from one start of the work to the next start."""
        self._interval = interval

    def hurry(self) -> None:
        """Makes the thread do the work now. If the work is in progress, the thread does it once more directly after."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._ended:
            begun = time.monotonic()
            try:
                self._work()
            except ProbingError as e:
                self._failed(e)
            except Exception as e:
                # The screen stays and shows the error.
                self._failed(InternalError(f"{type(e).__name__}: {e}"))
            self._wait(begun + max(self._interval, time.monotonic() - begun + _LEAST_S))

    def _wait(self, until: float) -> None:
        with self._changed:
            while not self._ended and (self._paused or (not self._hurried and time.monotonic() < until)):
                self._changed.wait(None if self._paused else until - time.monotonic())
            self._hurried = False
