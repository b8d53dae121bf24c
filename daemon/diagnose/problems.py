"""Keeps the last failure of each subject, for `status`, until that subject succeeds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from probing.api.errors import PeerError, ProbingError
from probing.api.text import escape

__all__ = ("Problem", "Problems")

_log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """A failure. ``since_ns``: the time of the first failure after the last success, UTC."""

    what: str
    why: str
    since_ns: int

    def as_text(self) -> str:
        return f"{self.what}: {self.why}"


class Problems:
    """The failures. Iterating over their texts is thread-safe. ``now_ns``: UTC."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._failed: dict[str, Problem] = {}

    def __iter__(self) -> Iterator[str]:
        return (one.as_text() for one in self.failed())

    def failed(self) -> list[Problem]:
        """Returns the failures, the oldest first. Thread-safe."""
        failed = list(self._failed.values())
        return sorted(failed, key=lambda one: one.since_ns)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Context manager that stores the text of an exception raised in its block, until a block with the same
        ``what`` succeeds. The exception is suppressed.
        """
        try:
            yield
        except Exception as e:
            why = escape(e.message if isinstance(e, ProbingError) else f"{type(e).__name__}: {e}")
            known = self._failed.get(what)
            found = Problem(escape(what), why, self._now_ns() if known is None else known.since_ns)
            self._failed[what] = found
            # The same problem is logged once; the problem of a collector that is being replaced is not logged.
            if known is None and not isinstance(e, PeerError):
                _log.warning("%s", found.as_text(), exc_info=not isinstance(e, ProbingError))
        else:
            self._failed.pop(what, None)

    def forget(self, what: str) -> None:
        """Drops the problem of a subject that is gone."""
        self._failed.pop(what, None)
