"""Ends the process when a call of NVML takes too long, and says which call it was.

A call that is stuck in the driver cannot be interrupted, and its thread may not even be killed. The other threads
of the process run on, so one of them reports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from probing.daemon.gpu.nvml.calls import Calls, Running

__all__ = ("LOOK_S", "Watchdog")

LOOK_S = 1.0


class Watchdog:
    """Calls ``give_up(call, seconds)`` once, with the lock of the ``calls`` that hang; it must not return."""

    def __init__(self, calls: Sequence[Calls], give_up: Callable[[Running, float], object]) -> None:
        self._calls = calls
        self._give_up = give_up
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        before = time.monotonic()
        # Time in which this process itself did not run counts against no call.
        pauses = 0.0
        started: dict[int, tuple[float, float]] = {}
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            pauses += max(0.0, now - before - 2 * LOOK_S)
            before = now
            for number, calls in enumerate(self._calls):
                with calls.lock:
                    running = calls.running
                    if running is None:
                        continue
                    if started.get(number, (0.0, 0.0))[0] != running.since:
                        started[number] = running.since, pauses
                    taken = now - running.since - (pauses - started[number][1])
                    if taken > running.allowed_s:
                        self._give_up(running, now - running.since)
                        return
