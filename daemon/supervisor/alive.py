"""How a process of the daemon shows that it is well, and says where it stands when it is not.

A thread asks the process what a client would ask it. Each answer is reported: to the supervisor by an empty line on the
inherited pipe (``fatal``), to systemd as ``WATCHDOG=1``. When reports stay away, either of them sends SIGABRT, at which
the stack of every thread goes to stderr and the process ends (faulthandler needs neither the GIL nor any lock of ours).
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

# A start may take this long: the log is recovered, programs are loaded, processes are found.
START_S = 120.0
# Of what the watcher allows, one of so many parts between two questions.
PARTS = 5
_log = logging.getLogger(__name__)


class Watch:
    """``well`` says whether the process answers within a number of seconds and made progress within as many.

    ``hang_s`` is what the watcher allows, 0: only what systemd asks for.

    The main thread calls ``step`` in each round of its own loop; until the first one the process starts.
    """

    def __init__(self, hang_s: float, well: Callable[[float], bool]) -> None:
        self._interval = watchdog_interval()
        self._hang_s = hang_s or 2 * (self._interval or 0.0)
        self._well = well
        self._begun = time.monotonic()
        self._stepped: float | None = None

    def start(self) -> None:
        faulthandler.enable()
        if self._hang_s:
            threading.Thread(target=self._run, name="watch", daemon=True).start()

    def step(self) -> None:
        self._stepped = time.monotonic()

    def _run(self) -> None:
        interval = min(self._hang_s / PARTS, self._interval or self._hang_s)
        while True:
            if self._is_well():
                alive()
                notify("WATCHDOG=1")
            time.sleep(interval)

    def _is_well(self) -> bool:
        now = time.monotonic()
        if self._stepped is None:
            return now < self._begun + START_S
        if now > self._stepped + self._hang_s:
            return False
        try:
            return self._well(self._hang_s / 2)
        except (ProbingError, OSError) as e:
            _log.warning("no sign of life: %s", e)
            return False
