"""Runs periodic work in threads other than the draining thread. A slow step delays only its own ticker."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable

from probing.daemon.clock import until_next

__all__ = ("Ticker",)

_log = logging.getLogger(__name__)


class Ticker:
    """A thread that calls each of ``steps`` every ``interval_s`` seconds, at the same moments as other tickers.

    An exception of a step is logged, and the step is called again after the next interval. With ``wakes``
    (descriptors), the thread also waits after each interval until a descriptor is readable. So idle intervals are
    skipped, and the events of an interval are handled in one batch.
    """

    def __init__(
        self,
        name: str,
        interval_s: Callable[[], float] | float,
        *steps: Callable[[], object],
        wakes: Iterable[int] = (),
    ) -> None:
        self._interval_s = interval_s if callable(interval_s) else lambda: interval_s
        self._steps = steps
        self._stopped = threading.Event()
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._wakes = tuple(wakes)
        for fd in (self._end, *self._wakes):
            self._poll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread; returns when the running step has ended."""
        self._stopped.set()
        os.eventfd_write(self._end, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._poll.close()
        os.close(self._end)

    def _run(self) -> None:
        while not self._stopped.wait(until_next(self._interval_s())):
            if self._wakes:
                self._poll.poll()
            for step in self._steps:
                try:
                    step()
                except Exception:  # an error of one source must not end the ticks of the other sources
                    _log.exception("a step of %s failed", self._thread.name)
