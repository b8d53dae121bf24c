"""Stacks through the processes that the daemon has for it: readers with a deadline, a parser without rights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes_helpers import Listener, listening
from python_stack_helpers import INTERPRETERS, child, frames_of, program

from probing.api.errors import NotPython, ProcessGone
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.requests import Values
from probing.daemon.python_stack.walk.threads import read_start_ns

# Who asks for so long gets an answer on any machine; nothing waits for it to pass.
PATIENCE = 60.0


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "reader.sock", "probing.daemon.confined.reader") as made:
        yield made


@pytest.fixture
def reader_pool(readers: Listener) -> Iterator[ReaderPool]:
    pool = ReaderPool(readers.path, size=2)
    yield pool
    pool.close()


@pytest.fixture
def stacks(tmp_path: Path, reader_pool: ReaderPool) -> Iterator[PythonStacks]:
    with ExitStack() as stack:
        parsers = stack.enter_context(listening(tmp_path / "parser.sock", "probing.daemon.confined.parser"))
        parser_pool = ParserPool(parsers.path)
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


def test_readers_stay_below_their_limit_of_memory_whatever_they_read(
    stacks: PythonStacks, reader_pool: ReaderPool, readers: Listener
) -> None:
    values = Values(reader_pool, stacks.prepare)
    with ExitStack() as stack:
        stack.callback(values.close)
        # Many tables in one process, and what is kept of several processes.
        hostile = [
            stack.enter_context(program(sys.executable, "large_tables.py", count)) for count in ("90", *["24"] * 6)
        ]
        for process in hostile:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        targets = [(process.pid, read_start_ns(process.pid)) for process in hostile]
        rows, failures = values.values(targets[:1], ["call"], PATIENCE)
        assert ([row["type"] for row in rows], failures) == (["function"], [])
        for target in targets:
            for _ in range(3):
                threads, failures = stacks.stacks([target], PATIENCE)
                assert failures == []
                assert [frame["func"] for frame in threads[0]["frames"]][-1] == "<module>"
        peaks = [re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{r.pid}/status").read_text()) for r in readers.processes]
    # MemoryMax of probingd-reader@.service is 256 MB.
    assert max(int(peak[1]) for peak in peaks if peak) < 200_000
