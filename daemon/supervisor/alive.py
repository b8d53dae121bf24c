"""Reports the health of a process to the supervisor and systemd.

A thread sends the process a request as a client would. Each answer is reported: to the supervisor by a line on the
inherited pipe (``fatal``), to systemd as ``WATCHDOG=1``. Without reports either of them sends SIGABRT; faulthandler,
which needs neither the GIL nor any lock of ours, then writes the stack of every thread to stderr.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable

from probing.api.errors import ProbingError
from probing.daemon.supervisor.fatal import alive
from probing.daemon.supervisor.notify import notify, watchdog_interval

__all__ = ("START_S", "Watch")

# For a start, s: the log is recovered, programs are loaded, processes are found.
START_S = 120.0
# Requests in the time after which the watcher gives up.
PARTS = 5
# Between two requests until the first answer, s: the start waits for it.
SOON_S = 0.05
STOP_S = 5.0
# Between two requests without a watcher, s.
ALONE_S = 5.0
_log = logging.getLogger(__name__)


class Watch:
    """Asks ``well(seconds)``: whether the process answers within so many seconds and made progress within as many.

    ``hang_s``: seconds without a report after which the supervisor acts; 0: only systemd watches. The main thread
    calls ``step`` in each round of its own loop; until the first call the process counts as starting.
    """

    def __init__(self, hang_s: float, well: Callable[[float], bool]) -> None:
        self._interval = watchdog_interval()
        self._hang_s = hang_s or 2 * (self._interval or 0.0)
        self._well = well
        self._begun = time.monotonic()
        self._stepped: float | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        faulthandler.enable()
        self._thread.start()

    def stop(self) -> None:
        """Ends the requests; the last one must have been answered or closed."""
        self._ended.set()
        self._started.set()
        self._thread.join(STOP_S)

    def step(self) -> None:
        self._stepped = time.monotonic()
        self._started.set()

    def _run(self) -> None:
        interval = min(self._hang_s / PARTS, self._interval or self._hang_s) or ALONE_S
        while not self._started.wait(interval):
            # A start that takes too long is a hang.
            if time.monotonic() < self._begun + START_S:
                _report(answers=False)
        answered = False
        while not self._ended.is_set() and (self._hang_s or not answered):
            if self._is_well():
                answered = True
                _report(answers=True)
            self._ended.wait(interval if answered else SOON_S)

    def _is_well(self) -> bool:
        seconds = self._hang_s / 2 or ALONE_S
        if self._hang_s and time.monotonic() > (self._stepped or 0.0) + self._hang_s:
            return False
        try:
            return self._well(seconds)
        except (ProbingError, OSError) as e:
            _log.warning("no sign of life: %s", e)
            return False


def _report(*, answers: bool) -> None:
    alive(answers=answers)
    notify("WATCHDOG=1")
