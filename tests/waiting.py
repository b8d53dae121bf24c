"""The one way in which tests wait: for a condition, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from costs import spent

__all__ = ("DEADLINE_S", "asking", "until", "whole_lines")

T = TypeVar("T")
_asked_s = 0.0
# How long a wait rests after it looked, in times of what that took, and at most.
_REST = 4.0
_LONGEST_REST_S = 1.0
# A guest whose instructions QEMU translates needs more.
DEADLINE_S = float(os.environ.get("PROBINGD_TEST_DEADLINE_S", "60"))


@contextmanager
def asking() -> Iterator[None]:
    """Notes that a block asks a daemon, for ``until``."""
    global _asked_s
    begun = time.monotonic()
    try:
        yield
    finally:
        _asked_s += time.monotonic() - begun


def until(
    condition: Callable[[], T],
    seconds: float = DEADLINE_S,
    *,
    what: str | Callable[[], object] = "the condition",
    poll_s: float = 0.01,
) -> T:
    """Returns the first true value of ``condition``.

    Calls it every ``poll_s`` seconds, and so rarely that its CPU time, and ``asking``, take a fifth of the time: who
    waits must not take the CPU from what it waits for.

    Raises AssertionError after ``seconds`` without one; the message names ``what``, which may be a function that
    describes the state at that time.
    """
    deadline = time.monotonic() + seconds
    with spent("waits for conditions"):
        while True:
            asked_before, cpu_before = _asked_s, time.thread_time()
            if value := condition():
                return value
            took = max(_asked_s - asked_before, time.thread_time() - cpu_before)
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what() if callable(what) else what}")
            time.sleep(max(poll_s, min(_REST * took, _LONGEST_REST_S)))


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file that another process is writing, without one that it has not ended yet."""
    return path.read_text().split("\n")[:-1]
