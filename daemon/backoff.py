"""Retry backoff: each consecutive failure doubles the time until the next try."""

from __future__ import annotations

import time
from collections.abc import Iterable

__all__ = (
    "Patience",
    "Pauses",
    "doubled",
)

FIRST_S = 30.0
MAX_S = 480.0
MAX_HELD = 1_024
# Limits the exponent: something can fail for weeks, and 2 to the number of its failures would not fit a float.
_MAX_DOUBLINGS = 32


def doubled(first_s: float, times: int, most_s: float) -> float:
    """Returns ``first_s`` doubled ``times`` times, at most ``most_s``."""
    return min(first_s * (1 << min(times, _MAX_DOUBLINGS)), most_s)


class Pauses:
    """The retry backoff of things that failed, by name. Not thread-safe. Times are on time.monotonic()."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def held(self, name: str) -> bool:
        """Returns whether ``name`` is in a pause and must not be tried."""
        until, _ = self._until.get(name, (0.0, 0.0))
        return until > time.monotonic()

    def failed(self, name: str) -> None:
        """Starts a pause of ``name``: 30 s, doubled for each further consecutive failure, at most 480 s."""
        _, before = self._until.pop(name, (0.0, 0.0))
        span = min(before * 2 or FIRST_S, MAX_S)
        self._until[name] = (time.monotonic() + span, span)
        while len(self._until) > MAX_HELD:
            self._until.pop(next(iter(self._until)))

    def worked(self, names: Iterable[str]) -> None:
        """Ends the pauses of ``names``, which have answered."""
        if self._until:
            for name in names:
                self._until.pop(name, None)

    def names(self) -> list[str]:
        """Returns the names that failed and have not answered since."""
        return list(self._until)


MOST_DOUBLINGS = 6


class Patience:
    """The interval between requests to a reader, which each consecutive failure doubles.

    ``reason``: why the last request failed, or what its answer lacks; empty after a complete answer.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._failures = 0

    @property
    def factor(self) -> int:
        """The interval, as a multiple of the usual interval: 1 to 64."""
        return 1 << self._failures

    def failed(self, reason: str) -> None:
        # Each try can block a reader, which is then killed and replaced. So tries become rare, about one a minute.
        self._failures = min(MOST_DOUBLINGS, self._failures + 1)
        self.reason = reason

    def answered(self, reason: str = "") -> None:
        """Notes that the reader answered. ``reason``: what the answer lacks."""
        self._failures = 0
        self.reason = reason
