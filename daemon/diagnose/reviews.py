"""When to review a job that advances: less and less often while its pace stays, and soon after that changes.

A review costs tenths of a second of CPU, the pace nothing. Whatever slows a job down changes its pace.
"""

from __future__ import annotations

__all__ = ("Reviews",)

# The time between two reviews doubles, up to so many times ``review_s``.
_MOST = 5
# A review that has to confirm another one follows it after so many seconds at most.
_CONFIRM_S = 10.0
# The pace is measured over so many calls and seconds at least. It has changed when it differs by a quarter in two such
# windows in a row.
_WINDOW_CALLS = 20
_WINDOW_S = 15.0
_CHANGE = 1.25


class Reviews:
    """``next``: when the next review is due. Times are of a monotonic clock, s."""

    def __init__(self, now: float, review_s: float) -> None:
        self.next = now + review_s
        self._review_s = review_s
        self._pause = review_s
        self._last = now
        self._begin: tuple[float, int] | None = None
        self._pace: float | None = None
        self._changed = False

    def reviewed(self, now: float, *, doubtful: bool, found: bool) -> None:
        """Plans the next review. ``doubtful``: it has to confirm this one; ``found``: a finding is open."""
        self._last = now
        if doubtful:
            self.next = now + min(self._review_s, _CONFIRM_S)
        else:
            self._pause = self._review_s if found else min(2 * self._pause, _MOST * self._review_s)
            self.next = now + self._pause

    def advanced(self, now: float, calls: int) -> None:
        """Follows the pace. ``calls``: how many operations the job has called in all."""
        if self._begin is None or calls < self._begin[1]:
            self._begin = now, calls
            return
        seconds, count = now - self._begin[0], calls - self._begin[1]
        if seconds < min(_WINDOW_S, self._review_s / 4) or count < _WINDOW_CALLS:
            return
        self._begin = now, calls
        self._compare(now, count / seconds)

    def _compare(self, now: float, pace: float) -> None:
        if self._pace is None:
            self._pace = pace
        changed = not self._pace / _CHANGE <= pace <= self._pace * _CHANGE
        if changed and self._changed:
            self._pace, changed = pace, False
            self._pause = self._review_s
            self.next = min(self.next, max(now, self._last + self._review_s))
        self._changed = changed
