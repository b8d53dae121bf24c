"""Spaces the requests to a reader that does not answer: each failure in a row doubles the time to the next request."""

from __future__ import annotations

__all__ = ("Patience",)

MOST_DOUBLINGS = 6


class Patience:
    """``reason``: why the last request had no answer, or what the answer lacked; empty when nothing was missing."""

    def __init__(self) -> None:
        self.reason = ""
        self._failures = 0

    @property
    def factor(self) -> int:
        """The factor by which the interval is longer than usual: 1 to 64."""
        return 1 << self._failures

    def failed(self, reason: str) -> None:
        # A reader that is blocked is killed and replaced: once a minute is often enough.
        self._failures = min(MOST_DOUBLINGS, self._failures + 1)
        self.reason = reason

    def answered(self, reason: str = "") -> None:
        """Takes an answer. ``reason``: what the answer lacks."""
        self._failures = 0
        self.reason = reason
