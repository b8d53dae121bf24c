"""Native frames through real readers and parsers, as the collector has them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_helpers import TIMEOUT, blocked_in, built, switches
from processes_helpers import Listener, listening

from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.native.requests import NativeStacks
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.stack_wire import Thread

WAITS = """
import sys, threading
import torch
def waits():
    sys.stdin.read()
    return torch.ones(1)
print("ready", flush=True)
list(map(lambda _: waits(), [1]))
"""


@pytest.fixture
def parser(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "parser.sock", "probing.daemon.confined.parser") as made:
        yield made


@pytest.fixture
def stacks(tmp_path: Path, parser: Listener) -> Iterator[tuple[PythonStacks, NativeStacks]]:
    with listening(tmp_path / "reader.sock", "probing.daemon.confined.reader") as reader:
        readers, parsers = ReaderPool(reader.path), ParserPool(parser.path)
        python = PythonStacks(readers, parsers)
        try:
            yield python, NativeStacks(readers, parsers, python.prepare)
        finally:
            python.close()
            readers.close()
            parsers.close()


@pytest.fixture
def waiting() -> Iterator[int]:
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            blocked_in(process.pid, process.pid, "0")
            yield process.pid
        finally:
            process.kill()


def main_thread(stacks: tuple[PythonStacks, NativeStacks], pid: int) -> tuple[list[str], str]:
    python, native = stacks
    threads, failures = python.stacks([(pid, read_start_ns(pid))], TIMEOUT)
    assert failures == []
    native.add(pid, read_start_ns(pid), threads, TIMEOUT)
    thread = next(t for t in threads if t["tid"] == pid)
    return [f["func"] for f in thread["frames"]], thread["native_missing"]


def test_a_program_is_unwound_and_notices_nothing(stacks: tuple[PythonStacks, NativeStacks], waiting: int) -> None:
    before = switches(waiting)
    names, missing = main_thread(stacks, waiting)
    assert missing == ""
    assert names[0] in ("read", "__read")
    assert names.index("waits") < names.index("<lambda>") < names.index("<module>") < names.index("Py_RunMain")
    assert names[-1] == "_start"
    for _ in range(20):
        assert main_thread(stacks, waiting) == (names, "")
    assert switches(waiting) == before


def test_a_parser_that_was_killed_is_replaced(
    stacks: tuple[PythonStacks, NativeStacks], waiting: int, parser: Listener
) -> None:
    first = main_thread(stacks, waiting)
    for process in parser.processes:
        process.kill()
        process.wait(TIMEOUT)
    assert main_thread(stacks, waiting) == first


def test_a_process_that_ends_meanwhile(stacks: tuple[PythonStacks, NativeStacks], waiting: int) -> None:
    python, native = stacks
    start_ns = read_start_ns(waiting)
    threads, _ = python.stacks([(waiting, start_ns)], TIMEOUT)
    kept = [f["func"] for f in threads[0]["frames"]]
    os.kill(waiting, signal.SIGKILL)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    native.add(waiting, start_ns, threads, TIMEOUT)
    assert [f["func"] for f in threads[0]["frames"]] == kept
    assert threads[0]["native_missing"] != ""


def test_a_name_that_takes_forever_delays_no_other_process(
    stacks: tuple[PythonStacks, NativeStacks], waiting: int, parser: Listener, tmp_path: Path
) -> None:
    # Each argument is a template of the one before, twice.
    numbers = ["", *"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    endless = "_Z1f1PIccE" + "".join(f"S_IS{number}_S{number}_E" for number in numbers[1:])
    program = built(tmp_path, "blocked.c", f"-Dwaits_here={endless}")
    with subprocess.Popen([program, "plain"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hostile:
        assert hostile.stdout
        assert hostile.stdout.readline() == "ready\n"
        blocked_in(hostile.pid, hostile.pid, "0")
        thread: Thread = {
            "tid": hostile.pid, "thread": "", "state": "sleeping", "gil": None, "complete": True, "frames": []
        }  # fmt: skip
        stacks[1].add(hostile.pid, read_start_ns(hostile.pid), [thread], TIMEOUT)
        hostile.kill()
    assert thread["native_missing"] == "the parser process ended while it unwound the stacks"
    assert [process.wait(TIMEOUT) for process in parser.processes[:2]] == [-signal.SIGVTALRM] * 2
    assert len(parser.processes) <= 4
    assert main_thread(stacks, waiting)[1] == ""
