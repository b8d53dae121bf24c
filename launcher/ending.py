"""Ends processes: time for the save step, SIGTERM, and SIGKILL after the grace time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Literal

from probing.launcher.processes import Stat, send

__all__ = ("Ending", "Stage")

Stage = Literal["save", "term", "kill"]


class Ending:
    """Ends all processes of the generations below ``below``. Times are ns since boot.

    ``save_ns``: the time that the save step may take. ``grace_ns``: time between SIGTERM and SIGKILL.
    """

    def __init__(self, below: int, now_ns: int, grace_ns: int, save_ns: int = 0) -> None:
        self.below = below
        self._grace_ns, self._term_ns, self._limit_ns = grace_ns, now_ns + save_ns, 1 << 62
        self._told: set[tuple[int, int]] = set()

    def stage(self, now_ns: int) -> Stage:
        """Returns the stage that is due at ``now_ns``."""
        if now_ns >= self._kill_ns:
            return "kill"
        return "term" if now_ns >= self._term_ns else "save"

    def saved(self, now_ns: int) -> None:
        """Ends the time for the save step."""
        self._term_ns = min(self._term_ns, now_ns)

    def limit(self, kill_ns: int) -> None:
        """Makes ``kill_ns`` the latest time at which SIGKILL is sent."""
        self._limit_ns = min(self._limit_ns, kill_ns)

    def signal(self, now_ns: int, processes: Iterable[Stat], send: Callable[..., bool] = send) -> None:
        """Sends the signals that are due to ``processes``, which are to be ended."""
        stage = self.stage(now_ns)
        for stat in processes if stage != "save" else ():
            if stage == "kill":
                send(stat, signal.SIGKILL)
            # SIGCONT, because a stopped process would not handle SIGTERM.
            elif (stat.pid, stat.start_ns) not in self._told and send(stat, signal.SIGTERM, signal.SIGCONT):
                self._told.add((stat.pid, stat.start_ns))

    @property
    def _kill_ns(self) -> int:
        return min(self._term_ns + self._grace_ns, self._limit_ns)
