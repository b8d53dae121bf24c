"""Stacks through the processes that the daemon has for it: readers with a deadline, a parser without rights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes_helpers import listening
from python_stack_helpers import INTERPRETERS, child, frames_of, program

from probing.api.errors import NotPython, ProcessGone
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.threads import read_start_ns

# Who asks for so long gets an answer on any machine; nothing waits for it to pass.
PATIENCE = 60.0


@pytest.fixture
def stacks(tmp_path: Path) -> Iterator[PythonStacks]:
    with ExitStack() as stack:
        readers = stack.enter_context(listening(tmp_path / "reader.sock", "probing.daemon.confined.reader"))
        parsers = stack.enter_context(listening(tmp_path / "parser.sock", "probing.daemon.confined.parser"))
        reader_pool, parser_pool = ReaderPool(readers.path, size=2), ParserPool(parsers.path)
        stack.callback(reader_pool.close)
        stack.callback(parser_pool.close)
        made = PythonStacks(reader_pool, parser_pool, parallel=2)
        stack.callback(made.close)
        yield made


def test_all_interpreters_at_once(stacks: PythonStacks, until: Callable[..., object]) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(program(p, "many_threads.py", "4")) for p in INTERPRETERS]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        targets = [(p.pid, read_start_ns(p.pid)) for p in processes]
        for python, target in zip(INTERPRETERS, targets, strict=True):
            code = "import platform; print(platform.python_version())"
            stated = subprocess.check_output([python, "-c", code], text=True).strip()
            assert stacks.python_version(*target, PATIENCE) == stated

        def all_wait() -> bool:
            threads, failures = stacks.stacks(targets, PATIENCE)
            assert failures == []
            assert [t["pid"] for t in threads] == [pid for pid, _ in targets for _ in range(4)]
            assert all(t["complete"] and t["frames"] and t["start_ns"] for t in threads)
            return all(t["frames"][0]["func"].endswith("wait") for t in threads)

        until(all_wait)
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        threads, failures = stacks.stacks(targets, PATIENCE)
        assert failures == []
        assert {t["state"] for t in threads} == {"stopped"}
        assert [len(t["frames"]) > 2 for t in threads[1:4]] == [True] * 3


def test_one_that_fails_does_not_cost_the_others(stacks: PythonStacks) -> None:
    with child("sleep", "9999") as other, program(sys.executable, "gil_in_c.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        targets = [(p.pid, read_start_ns(p.pid)) for p in (other, process)]
        targets.append((process.pid, 12345))
        threads, failures = stacks.stacks(targets, PATIENCE)
        assert [(f.pid, f.start_ns, type(f.error)) for f in failures] == [
            (other.pid, targets[0][1], NotPython),
            (process.pid, 12345, ProcessGone),
        ]
        assert [f[0] for f in frames_of(threads[0])] == ["hold", "<module>"]
        assert [t["gil"] for t in threads] == [True, False]
