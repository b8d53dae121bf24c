"""The tracer killed at each of its steps: the process goes on unchanged, and code can be run in it again."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from inject_helpers import asked, beats, busy, evaluated
from long import long, long_unless
from native_helpers import built
from python_stack_helpers import INTERPRETERS, child, read_mappings

from probing.daemon.inject.evaluation import Evaluation, evaluate
from probing.daemon.inject.places import instructions_of
from probing.daemon.inject.tracing import thread_stopped
from probing.daemon.processes.memory import ProcessMemory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long
_TRACEME, _CONT, _SYSCALL, _GETREGS, _SETOPTIONS, _SYSGOOD = 0, 7, 24, 12, 0x4200, 1
# Only these change something: ptrace and process_vm_writev.
_STEPS = (101, 311)


def _tracer(asked: Evaluation) -> int:
    """Starts a process that is traced itself, and that evaluates."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _libc.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        evaluate(asked)
    finally:
        os._exit(0)


def _system_calls(pid: int) -> Iterator[int]:
    """Yields the number of each system call of the tracer at its begin, and again at its end; ends with it."""
    registers = (ctypes.c_uint64 * 27)()
    os.waitpid(pid, 0)
    _libc.ptrace(_SETOPTIONS, pid, None, _SYSGOOD)
    deliver = 0
    while not _libc.ptrace(_SYSCALL, pid, None, deliver):
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return
        deliver = 0
        if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
            _libc.ptrace(_GETREGS, pid, None, ctypes.addressof(registers))
            yield int(registers[15])
        else:
            deliver = os.WSTOPSIG(status)


def _killed_at(asked: Evaluation, step: int) -> bool:
    """Evaluates, and kills the tracer at a step; returns whether it came to that step."""
    pid = _tracer(asked)
    steps = 0
    for number in _system_calls(pid):
        steps += number in _STEPS
        if steps > step:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True
    return False


@pytest.mark.parametrize("python", [long_unless(p in (INTERPRETERS[0], sys.executable), p) for p in INTERPRETERS])
def test_the_tracer_killed_at_each_step(python: str) -> None:
    with busy(python, "threads", "signals") as process:
        evaluation, step = asked(process.pid, "step"), 0
        # Three stops of at least eight steps each, and two writes, each at its begin and its end.
        while _killed_at(evaluation, step):
            beats(process)
            step += 1
        assert step >= 50
        assert evaluated(process.pid, "wrong")["value"] == "[]"
        # What was given up after the text was added has run, and nobody had read it.
        beats(process)


@long
@pytest.mark.timeout(1800)
def test_the_tracer_killed_a_thousand_times() -> None:
    with busy(sys.executable, "threads", "signals", "forks") as process:
        evaluation = asked(process.pid, "step")
        for number in range(1009):
            _killed_at(evaluation, number % 60)
        beats(process)


def test_all_registers_are_as_they_were(tmp_path: Path) -> None:
    """A C program that counts with values in its registers makes system calls at hundreds of random moments."""
    with child(str(built(tmp_path, "inject_registers.c", "-mavx", "-O1"))) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        maps = read_mappings(process.pid)
        instructions = instructions_of(ProcessMemory(process.pid), maps)
        calls = 0
        while calls < 307:
            with thread_stopped(process.pid) as stop:
                # Where it has not run since the last stop, frame upon frame would fill the stack.
                if stop is not None and stop.registers.rip != instructions.system_call:
                    # getppid, which changes nothing but RAX, RCX and R11.
                    stop.call(instructions.system_call, (), instructions.restorer, result=110)
                    calls += 1
        out, _ = process.communicate("\n", timeout=60)
        rounds, general, vectors = map(int, out.split())
        assert rounds > 1
        assert (general, vectors) == (0, 0)
