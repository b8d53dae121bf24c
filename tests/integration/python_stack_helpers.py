"""What the tests of Python stacks share: the interpreters, programs to be read, and a reader within this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import Parsers
from long import long_unless

from probing.api.errors import ProbingError
from probing.daemon.ipc import Message
from probing.daemon.processes.files import open_mapped
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps
from probing.daemon.processes.target import Target
from probing.daemon.python_stack.stacks.dump import dump_stacks, handlers
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.values.read import handlers as value_handlers
from probing.daemon.python_stack.walk.capture import forget
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.search import find_runtime
from probing.daemon.python_stack.walk.threads import read_start_ns

__all__ = (
    "INTERPRETERS",
    "PROGRAMS",
    "SID",
    "LocalReaders",
    "ReadersOfValues",
    "child",
    "cleaned",
    "dump",
    "each_in_turn",
    "each_interpreter",
    "frames_of",
    "program",
    "read_mappings",
    "runtime_in_memory",
    "runtime_of",
)

PROGRAMS = Path(__file__).parent / "python_programs"
# What packaging/dev/sid-python.sh makes: programs that run a CPython of Debian unstable in a root of its own.
SID = Path(__file__).parents[2] / ".build" / "sid-bin"


def _interpreters() -> list[str]:
    """Interpreters of PROBINGD_TEST_PYTHONS (paths, separated by colons), which must all exist; else all found here."""
    if named := os.environ.get("PROBINGD_TEST_PYTHONS"):
        return named.split(":")
    versions = Path.home() / ".pyenv" / "versions"
    found = [p for minor in range(8, 16) for p in sorted(versions.glob(f"3.{minor}.*/bin/python"))]
    found += [*Path("/opt").glob("python*/bin/python3"), Path("/usr/bin/python3"), Path(sys.executable)]
    # A chroot takes root.
    found += sorted(SID.glob("python3.*")) if os.geteuid() == 0 else []
    return [str(p) for p in {p.resolve(): p for p in found if p.exists()}.values()]


INTERPRETERS = _interpreters()
# The gate takes the oldest, the newest and the one that runs the tests.
_IN_GATE = {INTERPRETERS[0], sys.executable, INTERPRETERS[-1]}
each_interpreter = pytest.mark.parametrize("python", [long_unless(path in _IN_GATE, path) for path in INTERPRETERS])


class LocalReaders:
    """Answers like a reader process, from within this one."""

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        with Target(pid, start_ns) as target:
            if op == "maps":
                return Message({}, target.read("maps", 16 << 20))
            if op == "open":
                header, fd = open_mapped(target, args)
                return Message(header, fds=[fd])
            if op == "memory":
                parts = ProcessMemory(pid).read_many(args["ranges"])
                lengths = [-1 if p is None else len(p) for p in parts]
                return Message({"lengths": lengths}, b"".join(p or b"" for p in parts))
            return handlers()[op]({"op": op, "pid": pid, "start_ns": start_ns, **args})

    def call_each(
        self, op: str, asks: Dict[tuple[int, int], Callable[[], dict[str, Any]]], *, timeout: float, patience: float
    ) -> Iterator[tuple[tuple[int, int], Message | ProbingError]]:
        return each_in_turn(self.call, op, asks, timeout)


class ReadersOfValues(LocalReaders):
    """Also answers ``vars``."""

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        if op != "vars":
            return super().call(op, pid=pid, start_ns=start_ns, timeout=timeout, **args)
        request = {"op": op, "pid": pid, "start_ns": start_ns, **args}
        return Message(json.loads(json.dumps(value_handlers()[op](request))))


def each_in_turn(
    call: Callable[..., Message],
    op: str,
    asks: Dict[tuple[int, int], Callable[[], dict[str, Any]]],
    timeout: float,
) -> Iterator[tuple[tuple[int, int], Message | ProbingError]]:
    """``call_each`` of readers that have only ``call``."""
    for (pid, start_ns), ask in asks.items():
        try:
            yield (pid, start_ns), call(op, pid=pid, start_ns=start_ns, timeout=timeout, **ask())
        except ProbingError as e:
            yield (pid, start_ns), e


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child with pipes, killed at the end."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def program(python: str, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of ``python_programs``, killed at the end."""
    with child(python, "-u", str(PROGRAMS / name), *arguments) as process:
        yield process


def runtime_of(pid: int) -> RuntimeInfo:
    stacks = PythonStacks(LocalReaders(), Parsers())
    try:
        return stacks.prepare(pid, read_start_ns(pid), timeout=60)
    finally:
        stacks.close()


def read_mappings(pid: int) -> list[Mapping]:
    return parse_maps(Path(f"/proc/{pid}/maps").read_bytes())


def runtime_in_memory(pid: int) -> RuntimeInfo:
    """The runtime found without any file."""
    return find_runtime(ProcessMemory(pid).read_many, read_mappings(pid))


def dump(pid: int, runtime: RuntimeInfo, *, cold: bool = False) -> dict[str, Any]:
    if cold:
        forget(pid, read_start_ns(pid))
    return dump_stacks(pid, read_start_ns(pid), runtime, time.monotonic() + 60)


def frames_of(thread: dict[str, Any]) -> list[list[Any]]:
    """[func, file, lineno] of each frame, as the programs report them."""
    return [[f["func"], f["file"], f["lineno"]] for f in thread["frames"]]


def cleaned(frames: list[list[Any]]) -> list[list[Any]]:
    """What a program said of its own frames, with the texts as they are shown."""
    return [[clean_text(func, 4096), clean_text(file, 4096), lineno] for func, file, lineno in frames]
