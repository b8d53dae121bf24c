"""What the tests of code run in processes share: programs of each CPython, and an evaluation within this process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import Parsers
from python_stack_helpers import LocalReaders, program
from waiting import until

from probing.daemon.inject.evaluation import Evaluation, evaluate
from probing.daemon.inject.lookup import find_functions
from probing.daemon.processes.liveness import real_user
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.python_stack.walk.threads import read_start_ns

__all__ = ("ANSWER_BYTES", "asked", "beats", "busy", "evaluated", "regions")

# A region in a process is larger than this.
ANSWER_BYTES = 1 << 20


@contextmanager
def busy(python: str, *kinds: str) -> Iterator[subprocess.Popen[str]]:
    """``python_programs/inject_busy.py``, once it works."""
    with program(python, "inject_busy.py", *kinds) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def asked(pid: int, code: str, seconds: float = 30.0, **changed: Any) -> Evaluation:
    start_ns = read_start_ns(pid)
    deadline = time.monotonic() + 60
    functions = find_functions(LocalReaders(), Parsers(), pid, start_ns, deadline)  # type: ignore[arg-type]
    uid = real_user(pid)
    assert uid is not None
    return Evaluation(pid, start_ns, uid, functions.to_dict(), code, seconds)._replace(**changed)


def evaluated(pid: int, code: str, seconds: float = 30.0) -> dict[str, Any]:
    return evaluate(asked(pid, code, seconds))


def regions(pid: int) -> list[str]:
    """Lines of /proc/PID/maps of memory that an evaluation has mapped, with its text behind the answer."""
    found, memory = [], ProcessMemory(pid)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        is_large = not name and inode == "0" and ANSWER_BYTES < end - start < ANSWER_BYTES + (128 << 10)
        # Python's own arenas may be as large.
        if is_large and memory.read_many([(start + ANSWER_BYTES, 5)])[0] in (b"if 1:", b"if 0:"):
            found.append(line)
    return found


def beats(process: subprocess.Popen[str]) -> None:
    """Waits until the program has checked its own results 100 times more, after this call."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("how far\n")
    process.stdin.flush()
    line = until(process.stdout.readline, what="an answer of the program")
    assert line == "well\n", f"{line!r}, and the program has ended with {process.poll()}"
