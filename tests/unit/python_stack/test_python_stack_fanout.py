"""Asking for many processes: each one's trouble is its own, and the answer comes in time."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from probing.api.errors import CorruptTarget, InternalError, NotPython, ProbingError, TargetTimeout
from probing.daemon.elf.symbols import FileSymbols, Symbol
from probing.daemon.ipc import Message
from probing.daemon.python_stack.stacks.requests import PythonStacks

MAPS = b"7f0000000000-7f0000100000 r--p 00000000 08:01 12 /opt/lib/libpython3.11.so.1.0\n"
HEXVERSION = 0x030B07F0
STUCK, FOREIGN, BROKEN, CHANGED = 2, 3, 4, 5


class Parsers:
    def symbols(self, fd: int, patterns: Sequence[str], timeout: float) -> FileSymbols:
        addresses = {"_PyRuntime": 4096, "Py_Version": 8192}
        return FileSymbols(tuple(Symbol(name, at, None, 0, b"") for name, at in addresses.items()), 0, True, 62)


class Readers:
    """Process 1 answers; the others are as their names say."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[tuple[str, int]] = []

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        self.asked.append((op, pid))
        if pid == STUCK:
            self.release.wait()
        if op == "maps":
            return Message({}, b"" if pid == FOREIGN else MAPS)
        if op == "memory":
            return Message({"lengths": [4]}, HEXVERSION.to_bytes(4, "little"))
        if op == "stacks":
            if pid == CHANGED and self.asked.count((op, pid)) == 1:
                raise CorruptTarget("it called exec")
            assert args["runtime"]["python"] == "3.11.7"
            thread = {"tid": pid, "frames": [[0, 7, 99, 1]]}
            text = json.dumps({"codes": [["f", "/f.py"]], "threads": [{}] if pid == BROKEN else [thread]})
            return Message({}, text.encode())
        return Message({}, fds=[os.open("/dev/null", os.O_RDONLY)])

    def call_each(
        self, op: str, asks: Mapping[tuple[int, int], Callable[[], dict[str, Any]]], *, timeout: float, patience: float
    ) -> Iterator[tuple[tuple[int, int], Message | ProbingError]]:
        for (pid, start_ns), ask in asks.items():
            try:
                yield (pid, start_ns), self.call(op, pid=pid, start_ns=start_ns, timeout=timeout, **ask())
            except ProbingError as e:
                yield (pid, start_ns), e


@pytest.fixture
def readers() -> Readers:
    return Readers()


@pytest.fixture
def stacks(readers: Readers) -> Iterator[PythonStacks]:
    made = PythonStacks(readers, Parsers(), parallel=3)
    yield made
    readers.release.set()
    made.close()


def test_one_that_is_stuck(stacks: PythonStacks) -> None:
    stacks.stacks([(1, 10)], 60)
    threads, failures = stacks.stacks([(STUCK, 20), (1, 10)], 0.7)
    assert [(t["pid"], t["start_ns"], t["tid"]) for t in threads] == [(1, 10, 1)]
    frame = {"func": "f", "file": "/f.py", "lineno": 7, "frame_type": "Python", "ip": 99, "entry": True}
    assert threads[0]["frames"] == [frame]
    assert [(f.pid, f.start_ns, type(f.error)) for f in failures] == [(STUCK, 20, TargetTimeout)]
    assert failures[0].error.hint


def test_others_that_cannot_be_read(stacks: PythonStacks) -> None:
    threads, failures = stacks.stacks([(FOREIGN, 30), (BROKEN, 40), (1, 10), (1, 10)], 60)
    assert [t["pid"] for t in threads] == [1]
    assert [(f.pid, type(f.error)) for f in failures] == [(FOREIGN, NotPython), (BROKEN, InternalError)]


def test_a_runtime_is_found_once_and_again_after_exec(stacks: PythonStacks, readers: Readers) -> None:
    assert stacks.python_version(1, 10) == "3.11.7"
    stacks.stacks([(1, 10)], 60)
    assert readers.asked == [(op, 1) for op in ("maps", "open", "memory", "stacks")]
    threads, failures = stacks.stacks([(CHANGED, 50)], 60)
    assert (len(threads), failures) == (1, [])
    once = [(op, CHANGED) for op in ("maps", "open", "memory", "stacks")]
    assert readers.asked[4:] == once * 2
    stacks.forget(1, 10)
    stacks.prepare(1, 10)
    assert readers.asked.count(("maps", 1)) == 2


def test_no_time_at_all(stacks: PythonStacks) -> None:
    threads, failures = stacks.stacks([(1, 10)], 0.0)
    assert threads == []
    assert [type(f.error) for f in failures] == [TargetTimeout]
