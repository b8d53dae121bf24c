"""Work that comes round by time, off the thread that drains the rings: what is slow here holds up only its own kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ("Ticker",)

_log = logging.getLogger(__name__)


class Ticker:
    """A thread that calls each of ``steps`` every ``interval_s`` seconds; one that fails is logged and called again."""

    def __init__(self, name: str, interval_s: float, *steps: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._steps = steps
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the step that runs has ended."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            for step in self._steps:
                try:
                    step()
                except Exception:  # one source must not end the turns of the others
                    _log.exception("a turn of %s failed", self._thread.name)
