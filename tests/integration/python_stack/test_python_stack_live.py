"""Processes that do not sit still, do not answer, or become something else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes import Parsers
from python_stack_helpers import (
    INTERPRETERS,
    PROGRAMS,
    LocalReaders,
    child,
    dump,
    each_interpreter,
    frames_of,
    program,
    runtime_of,
)

from probing.api.errors import CorruptTarget, NotPython, PrivilegeError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.python_stack.stacks.dump import dump_stacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.threads import read_start_ns

# Who may be called by whom in busy.py, innermost first.
CHAINS = {
    ("leaf_a", "branch_a"),
    ("leaf_b", "branch_b"),
    ("branch_a", "work"),
    ("branch_b", "work"),
    ("deep_c", "deep_c"),
    ("deep_c", "work"),
}
Until = Callable[..., object]


def line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == expected


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


@each_interpreter
def test_a_thread_that_holds_the_gil_in_c(python: str, until: Until) -> None:
    source = (PROGRAMS / "gil_in_c.py").read_text().splitlines()
    asleep = 1 + next(i for i, text in enumerate(source) if ".sleep(" in text)
    with program(python, "gil_in_c.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)
        # On its last way into C it may still have to wait for the lock once.
        until(lambda: dump(process.pid, runtime)["threads"][0]["gil"])
        until(lambda: dump(process.pid, runtime)["threads"][0]["frames"][0]["lineno"] == asleep)
        main, other = dump(process.pid, runtime)["threads"]
        assert main["tid"] == process.pid
        assert main["complete"]
        assert [f["func"] for f in main["frames"]] == ["hold", "<module>"]
        assert (main["gil"], other["gil"]) == (True, False)


@each_interpreter
def test_stacks_of_busy_threads_are_whole(python: str) -> None:
    with program(python, "busy.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)
        whole = holders = 0
        for _ in range(100):
            threads = dump(process.pid, runtime)["threads"]
            holders = max(holders, sum(t["gil"] is True for t in threads))
            for thread in threads:
                if not thread["complete"] or not thread["frames"]:
                    continue
                functions = [f["func"] for f in thread["frames"] if f["file"].endswith("busy.py")]
                pairs = set(pairwise(functions))
                assert pairs <= CHAINS | {("work", "<module>"), ("waits", "<module>")}
                whole += "work" in functions
        assert holders == 1
        # The program runs meanwhile, on one or more processors; most stacks can still be had whole.
        assert whole >= 50


@each_interpreter
def test_an_address_that_is_used_again(python: str) -> None:
    with program(python, "reuse.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)
        seen: dict[int, set[int]] = {}
        for number in (3, 6, 9, 3, 200, 12, 7, 15, 10):
            tell(process, str(number))
            line(process, "parked")
            main = dump(process.pid, runtime)["threads"][0]
            func = main["frames"][1]
            assert frames_of(main)[1:3] == [
                [f"func_{number:03}", f"<file {number:03}>", number % 3 + 2],
                ["<module>", f"<file {number:03}>", number % 3 + 5],
            ]
            seen.setdefault(func["ip"], set()).add(number)
            tell(process, "go on")
        assert main["complete"]
        # Else this would show nothing.
        assert max(map(len, seen.values())) > 1


@each_interpreter
def test_a_forked_child_of_threads(python: str, until: Until) -> None:
    code = "import os,threading,time\nthreading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
    code += "pid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(9999)\n"
    with child(python, "-W", "ignore", "-c", code) as process:
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        try:
            runtime = runtime_of(forked)
            until(lambda: frames_of(dump(forked, runtime)["threads"][0]) == [["<module>", "<string>", 5]])
            assert [t["tid"] for t in dump(forked, runtime)["threads"]] == [forked]
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_process_in_a_pid_namespace(until: Until) -> None:
    code = "import threading,time\nthreading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
    code += "print('ready', flush=True)\ntime.sleep(9998)\n"
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    with child("unshare", *user, "--pid", "--fork", "--kill-child", sys.executable, "-c", code) as process:
        line(process, "ready")
        (pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        runtime = runtime_of(pid)
        until(lambda: frames_of(dump(pid, runtime)["threads"][0]) == [["<module>", "<string>", 4]])
        main, other = dump(pid, runtime)["threads"]
        assert main["tid"] == pid
        assert other["frames"][0]["func"] in ("Thread.run", "run")


def test_exec_of_another_program(until: Until) -> None:
    old, new = INTERPRETERS[0], INTERPRETERS[-1]
    later = "import time; print('second', flush=True)\ntime.sleep(9999)"
    code = f"import os; print('first', flush=True); input(); os.execv({new!r}, [{new!r}, '-c', {later!r}])"
    with child(old, "-c", code) as process:
        stacks = PythonStacks(LocalReaders(), Parsers())
        try:
            target = (process.pid, read_start_ns(process.pid))
            line(process, "first")
            threads, failures = stacks.stacks([target], 60)
            assert failures == []
            assert frames_of(threads[0]) == [["<module>", "<string>", 1]]
            stale = stacks.prepare(*target)
            tell(process, "")
            line(process, "second")
            with pytest.raises(CorruptTarget):
                dump(process.pid, stale)

            def slept() -> bool:
                threads, failures = stacks.stacks([target], 60)
                assert failures == []
                return frames_of(threads[0]) == [["<module>", "<string>", 2]]

            until(slept)
        finally:
            stacks.close()


def test_what_cannot_be_read() -> None:
    stacks = PythonStacks(LocalReaders(), Parsers())
    with child("sleep", "9999") as other, program(sys.executable, "busy.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)
        with pytest.raises(TargetTimeout):
            dump_stacks(process.pid, 0, runtime, time.monotonic() - 1)
        with pytest.raises(ProcessGone):
            dump_stacks(process.pid, 12345, runtime, time.monotonic() + 60)
        with pytest.raises(NotPython):
            stacks.prepare(other.pid, read_start_ns(other.pid), 60)
        start_ns = read_start_ns(process.pid)
        process.kill()
        process.wait()
        threads, failures = stacks.stacks([(process.pid, start_ns), (other.pid, read_start_ns(other.pid))], 60)
        assert threads == []
        assert [type(f.error) for f in failures] == [ProcessGone, NotPython]
    stacks.close()


def test_a_zombie_has_gone() -> None:
    with program(sys.executable, "busy.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises((ProcessGone, PrivilegeError)):
            dump(process.pid, runtime)


def test_the_start_of_an_interpreter_is_never_an_error() -> None:
    """A process is read from its first instruction on: each answer is stacks, or says what it is not yet."""
    answers: list[Any] = []
    stacks = PythonStacks(LocalReaders(), Parsers())
    for _ in range(5):
        with child(INTERPRETERS[-1], "-c", "import json") as process:
            start_ns = read_start_ns(process.pid)
            while process.poll() is None:
                threads, failures = stacks.stacks([(process.pid, start_ns)], 60)
                answers += [*threads, *(f.error for f in failures)]
    stacks.close()
    for answer in answers:
        if isinstance(answer, UnsupportedTarget):
            # It called exec between the look at its mappings and the opening of one.
            assert "any more" in answer.message or "replaced" in answer.message
        elif not isinstance(answer, dict):
            assert isinstance(answer, NotPython | ProcessGone | CorruptTarget | PrivilegeError)


@each_interpreter
def test_a_thread_in_another_interpreter(python: str, until: Until) -> None:
    with program(python, "subinterpreter.py") as process:
        line(process, "ready")
        runtime = runtime_of(process.pid)

        def slept() -> bool:
            (main,) = dump(process.pid, runtime)["threads"]
            assert [f["func"] for f in main["frames"]] == ["inner", "<module>", "enter", "<module>"]
            return bool(main["complete"] and main["frames"][0]["lineno"] == 4)

        until(slept)
