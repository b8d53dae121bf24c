"""A thread that repeats one piece of work, for sources whose work must not hold up the thread that drains the rings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from probing.api.errors import ProbingError
from probing.daemon.clock import until_next

__all__ = ("Worker",)

_log = logging.getLogger(__name__)


class Worker:
    """Calls ``turn`` at the start, then every ``interval_s`` seconds, and as soon as ``wake`` was called.

    An exception in ``turn`` is logged, and does not end the thread. ``patience_s``: how long ``stop`` waits for a call
    in progress, in s; None: until it ends. ``aligned``: calls begin at the same moments as the calls of other
    workers (``until_next``); otherwise ``interval_s`` is the pause between two calls.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        interval_s: Callable[[], float],
        *,
        patience_s: float | None = None,
        aligned: bool = True,
    ) -> None:
        self._turn = turn
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._aligned = aligned
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called. A long ``turn`` should then return."""
        return self._stopped

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread call ``turn`` at once, or right after the call in progress. Thread-safe."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._patience_s)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            try:
                self._turn()
            except ProbingError as e:
                _log.warning("%s: %s", self._thread.name, e.message)
            except Exception:  # an error with one process must not end the work for other processes
                _log.exception("a turn of %s failed", self._thread.name)
            pause_s = self._interval_s()
            self._wake.wait(until_next(pause_s) if self._aligned else pause_s)
