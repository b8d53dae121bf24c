"""The talk of a job with who started it: commands come as lines, answers go as JSON behind ``@``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ("Command", "answer", "clock_offset_ns", "here_is_no", "serve", "stand")

Command = Callable[..., "dict[str, Any] | None"]


def answer(**content: object) -> None:
    """Writes an answer."""
    sys.stdout.write("@" + json.dumps(content) + "\n")
    sys.stdout.flush()


def clock_offset_ns() -> int:
    """Returns what to add to CLOCK_MONOTONIC to get UTC, ns."""
    return time.time_ns() - time.monotonic_ns()


def here_is_no(what: str) -> NoReturn:
    """Answers that something is missing that the job needs, and ends it."""
    answer(missing=what)
    sys.exit(0)


def stand() -> None:
    """Answers with the functions on this thread's stack, innermost first, and stands still in the innermost."""
    answer(frames=[frame.name for frame in reversed(traceback.extract_stack())], tid=threading.get_native_id())
    while True:
        time.sleep(1)


def serve(commands: Mapping[str, Command]) -> None:
    """Executes commands until ``exit`` or the end of the input. A command may answer itself and return None.

    Each job also has the command ``stand``.
    """
    commands = {"stand": stand, **commands}
    answer(ready=True, pid=os.getpid())
    for line in sys.stdin:
        name, *words = line.split()
        if name == "exit":
            return
        try:
            content = commands[name](*words)
        except Exception as e:  # the other side must not wait for an answer
            traceback.print_exc()
            answer(error=f"{name}: {type(e).__name__}: {e}")
            continue
        if content is not None:
            answer(**content)
