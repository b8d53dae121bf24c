"""Waits on behalf of a caller that has a deadline and may go away."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from probing.api.errors import QueryError

__all__ = ("GLANCE_S", "stop_if", "wait_readable")

# Time until a caller that went away is noticed, s.
GLANCE_S = 0.05


def stop_if(cancelled: Callable[[], bool]) -> None:
    """Raises QueryError if the caller went away."""
    if cancelled():
        raise QueryError("the query was cancelled: nobody waits for its answer")


def wait_readable(fd: int, deadline: float, cancelled: Callable[[], bool]) -> bool:
    """Returns whether ``fd`` became readable, or its other end hung up, before ``deadline`` on time.monotonic().

    Raises QueryError if the caller went away.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(GLANCE_S * 1000):
        stop_if(cancelled)
        if time.monotonic() >= deadline:
            return False
    return True
