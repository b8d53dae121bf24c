"""Pauses of requests, and of devices, that get no answer: each failure in a row makes the pause longer."""

from __future__ import annotations

import time
from collections.abc import Iterable

__all__ = ("Pauses",)

FIRST_S = 30.0
MAX_S = 480.0
MAX_HELD = 1_024


class Pauses:
    """The pauses by name. Not safe for two threads at once. Times are on time.monotonic()."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def held(self, name: str) -> bool:
        """Returns whether ``name`` pauses now."""
        until, _ = self._until.get(name, (0.0, 0.0))
        return until > time.monotonic()

    def failed(self, name: str) -> None:
        """Begins a pause of ``name``: 30 s, twice as long each time in a row, 480 s at most."""
        _, before = self._until.pop(name, (0.0, 0.0))
        span = min(before * 2 or FIRST_S, MAX_S)
        self._until[name] = (time.monotonic() + span, span)
        while len(self._until) > MAX_HELD:
            self._until.pop(next(iter(self._until)))

    def worked(self, names: Iterable[str]) -> None:
        """Forgets the failures of ``names``, which have answered."""
        if self._until:
            for name in names:
                self._until.pop(name, None)

    def names(self) -> list[str]:
        """Returns the names that failed and have not answered since."""
        return list(self._until)
