"""Threads are called what ``threading`` calls them, and only the oldest of very many are read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from fakes import Parsers
from python_stack_helpers import (
    INTERPRETERS,
    LocalReaders,
    child,
    dump,
    each_interpreter,
    program,
    runtime_of,
)

from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.capture import LIMITS
from probing.daemon.python_stack.walk.threads import read_start_ns, read_threads

MANY = 1201


def ready(process: subprocess.Popen[str], word: str = "ready") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"


def names(process: subprocess.Popen[str]) -> list[str]:
    found: list[dict[str, Any]] = dump(process.pid, runtime_of(process.pid))["threads"]
    return [thread["thread"] for thread in found]


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
    ready(process, "done")


@each_interpreter
def test_threads_have_the_names_that_python_gave_them(python: str) -> None:
    with program(python, "named_threads.py") as process:
        ready(process)
        others = ["MainThread", "loader-\u00fc", ("long " * 13)[:64], "red\\x1b[31m"]
        assert names(process) == [*others, "last"]
        tell(process, "renamed")
        # What was read before is noticed to be old; the next look reads it.
        assert names(process)[-1] in ("renamed", names_of_the_kernel(process)[-1])
        assert names(process) == [*others, "renamed"]
        tell(process, "number")
        assert names(process) == [*others, names_of_the_kernel(process)[-1]]
        tell(process, "gone")
        assert names(process)[0] in ("MainThread", names_of_the_kernel(process)[0])


def names_of_the_kernel(process: subprocess.Popen[str]) -> list[str]:
    return [thread.name for thread in read_threads(process.pid)]


def test_a_process_without_threading_has_the_names_of_the_kernel() -> None:
    with child(INTERPRETERS[0], "-S", "-c", "import sys; print('ready', flush=True); sys.stdin.read()") as process:
        ready(process)
        assert names(process) == names_of_the_kernel(process)


def test_the_first_of_very_many_threads() -> None:
    with program(sys.executable, "many_threads.py", str(MANY)) as process:
        ready(process)
        start_ns = read_start_ns(process.pid)
        stacks = PythonStacks(LocalReaders(), Parsers())
        try:
            threads, failures = stacks.stacks([(process.pid, start_ns)], timeout=30.0)
        finally:
            stacks.close()
        assert len(threads) == LIMITS.stacks
        assert (threads[0]["tid"], threads[0]["thread"]) == (process.pid, "MainThread")
        assert {frame["func"].rpartition(".")[2] for t in threads[1:] for frame in t["frames"]} >= {"deep", "wait"}
        (failure,) = failures
        assert failure.error.message.startswith(f"{MANY - LIMITS.stacks} of its threads are left out")
