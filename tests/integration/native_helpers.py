"""What the tests of native frames share: programs that are built, and readers and parsers within this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import Parsers
from python_stack_helpers import LocalReaders
from waiting import until

from probing.daemon.ipc import Message
from probing.daemon.python_stack.native.registers import handlers as reader_handlers
from probing.daemon.python_stack.native.requests import NativeStacks
from probing.daemon.python_stack.native.unwind import handlers as parser_handlers
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.threads import read_start_ns, read_threads

__all__ = (
    "PROGRAMS",
    "TIMEOUT",
    "NativeParsers",
    "NativeReaders",
    "blocked_in",
    "built",
    "merged",
    "native",
    "pystack",
    "stacks_of",
    "switches",
    "tids",
)

PROGRAMS = Path(__file__).parent / "native_programs"
TIMEOUT = 60.0


class NativeReaders(LocalReaders):
    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        if op == "native":
            return reader_handlers()[op]({"op": op, "pid": pid, "start_ns": start_ns, **args})
        return super().call(op, pid=pid, start_ns=start_ns, timeout=timeout, **args)


class NativeParsers(Parsers):
    """``files`` counts the descriptors that it was handed."""

    def __init__(self) -> None:
        self.handlers = parser_handlers()
        self.files = 0

    def call(self, op: str, payload: bytes, *, fds: Sequence[int], timeout: float, **args: Any) -> dict[str, Any]:
        self.files += len(fds)
        answer = self.handlers[op](Message({"op": op, **args}, payload, list(fds)))
        parsed = json.loads(answer)
        assert isinstance(parsed, dict)
        return parsed


def built(folder: Path, source: str, *flags: str) -> Path:
    compiler = "g++" if source.endswith(".cpp") else "gcc"
    target = folder / "built"
    command = [compiler, "-fno-optimize-sibling-calls", *flags, "-o", str(target), str(PROGRAMS / source), "-pthread"]
    subprocess.run(command, check=True)
    return target


def blocked_in(pid: int, tid: int, call: str) -> None:
    """Wait until the thread is blocked in a system call, by the kernel's number of it."""
    current = Path(f"/proc/{pid}/task/{tid}/syscall")
    what = f"system call {call} of thread {tid}"
    until(lambda: current.read_text().startswith(f"{call} "), TIMEOUT, what=what, poll_s=0.001)


def native(
    pid: int, parsers: NativeParsers | None = None, readers: NativeReaders | None = None
) -> dict[int, dict[str, Any]]:
    """The threads of a process that runs no Python, by tid."""

    def no_runtime(*_: object) -> Any:
        raise AssertionError("no Python was asked for")

    threads = [{"tid": k.tid, "thread": k.name, "state": k.state, "frames": []} for k in read_threads(pid)]
    source = NativeStacks(readers or NativeReaders(), parsers or NativeParsers(), no_runtime)
    source.add(pid, read_start_ns(pid), threads, TIMEOUT)
    return {thread["tid"]: thread for thread in threads}


@contextmanager
def stacks_of(pid: int) -> Iterator[Callable[[], dict[int, dict[str, Any]]]]:
    """What reads a Python process: its threads with frames of both kinds, by tid."""
    readers, parsers = NativeReaders(), NativeParsers()
    stacks = PythonStacks(readers, parsers)
    source = NativeStacks(readers, parsers, stacks.prepare)

    def read() -> dict[int, dict[str, Any]]:
        threads, failures = stacks.stacks([(pid, read_start_ns(pid))], TIMEOUT)
        assert failures == []
        source.add(pid, read_start_ns(pid), threads, TIMEOUT)
        return {thread["tid"]: thread for thread in threads}

    try:
        yield read
    finally:
        stacks.close()


def merged(pid: int) -> dict[int, dict[str, Any]]:
    with stacks_of(pid) as read:
        return read()


def tids(pid: int) -> list[int]:
    return sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())


def switches(pid: int) -> dict[int, list[str]]:
    """The counts of context switches of each thread, and its tracer."""
    words = ("voluntary_ctxt", "nonvoluntary_ctxt", "TracerPid")
    return {
        tid: [w for w in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines() if w.startswith(words)]
        for tid in tids(pid)
    }


def pystack(pid: int) -> str:
    """What pystack says of a process, which it stops for it."""
    command = [str(Path(sys.executable).parent / "pystack"), "remote", "--native-all", str(pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
