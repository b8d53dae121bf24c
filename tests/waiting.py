"""The one way in which tests wait: for a condition, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from costs import spent

__all__ = ("DEADLINE_S", "until", "whole_lines")

T = TypeVar("T")
# A guest whose instructions QEMU translates needs more.
_REST = 4.0
_LONGEST_REST_S = 1.0
DEADLINE_S = float(os.environ.get("PROBINGD_TEST_DEADLINE_S", "60"))


def until(
    condition: Callable[[], T],
    seconds: float = DEADLINE_S,
    *,
    what: str | Callable[[], object] = "the condition",
    poll_s: float = 0.01,
) -> T:
    """Returns the first true value of ``condition``.

    Calls it every ``poll_s`` seconds, and not so often that it takes more than a fifth of the time: a condition that
    asks a daemon must not take the CPU from what it waits for.

    Raises AssertionError after ``seconds`` without one; the message names ``what``, which may be a function that
    describes the state at that time.
    """
    deadline = time.monotonic() + seconds
    with spent("waits for conditions"):
        while True:
            begun = time.monotonic()
            if value := condition():
                return value
            now = time.monotonic()
            if now > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what() if callable(what) else what}")
            time.sleep(max(poll_s, min(_REST * (now - begun), _LONGEST_REST_S)))


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file that another process is writing, without one that it has not ended yet."""
    return path.read_text().split("\n")[:-1]
