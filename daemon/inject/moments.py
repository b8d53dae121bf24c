"""Waits for a moment at which a thread can make a call for us. At the deadline, says what the main thread did instead.

Code is handed over only while the main thread executes the evaluation loop itself. The thread is then in no system call
and in no function of the C library, of an allocator or of the lock that ``Py_AddPendingCall`` takes, and Python will
look at its pending calls within microseconds. Some compilers make each instruction a function of its own (CPython 3.13
and later). For these builds, code is handed over while the main thread executes code of the interpreter and the lock is
free. A sleeping thread is never stopped.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from probing.api.errors import ProbingError, ProcessGone, TargetTimeout
from probing.daemon.inject.pending import find_pending_lock, is_unlocked
from probing.daemon.inject.places import Functions, Instructions
from probing.daemon.inject.tracing import Stop, is_traced, thread_stopped
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import Mapping, parse_stat
from probing.daemon.processes.target import Target

__all__ = ("Moments",)

_FIRST_PAUSE_S, _LAST_PAUSE_S, _GROWTH = 0.0005, 0.005, 1.05
_MOST_STACK = 1 << 20
_MOST_THREADS = 256
# Offsets in a signal frame, from the word with the restorer's address: uc_link, uc_stack.ss_flags, the code segment.
_LINK, _STACK_FLAGS, _SEGMENT = 16, 32, 192
_CODE_SEGMENT, _OURS = 0x33, 0x40
_STATES = {
    "S": "it waited in C, for a lock, a device or a peer",
    "D": "it was in an uninterruptible wait, as in vfork or for storage",
    "T": "it was stopped",
    "t": "it was traced",
}
_SLEEPS = "`probingctl stacks` and `vars` show what it does, and put nothing into the process"


class Moments:
    """Finds moments at which threads of one process can make calls for us. ``stops_us``: the length of each stop."""

    def __init__(
        self, target: Target, memory: Memory, maps: Sequence[Mapping], functions: Functions, instructions: Instructions
    ) -> None:
        self._target = target
        self._memory = memory
        self._maps = maps
        self._functions = functions
        self._restorer = instructions.restorer
        self._program = functions.program(maps)
        self._lock = 0 if functions.has_loop else find_pending_lock(memory, functions.runtime, functions.runtime_bytes)
        self._why = ""
        self._in_handler = False
        self.stops_us: list[float] = []

    def for_system_call(self, act: Callable[[Stop], None], deadline: float) -> None:
        """Stops a running thread where it can safely make a system call for us, and calls ``act`` with the stop.

        ``deadline`` is a time of time.monotonic(). Raises TargetTimeout if there was no such moment until then.
        """
        self._wait(self._running, lambda stop: not stop.is_restartable_sequence(), act, deadline)

    def for_pending_call(self, act: Callable[[Stop], None], deadline: float) -> None:
        """Stops the main thread where it can call ``Py_AddPendingCall``, and calls ``act`` with the stop.
        ``deadline`` and errors are as in ``for_system_call``.
        """
        self._wait(self._main_running, self._evaluates, act, deadline)

    def _wait(
        self,
        running: Callable[[], int | None],
        good: Callable[[Stop], bool],
        act: Callable[[Stop], None],
        deadline: float,
    ) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            if (tid := running()) is not None:
                if self._acted(tid, good, act):
                    return
                # The pauses are random, so that the stops do not fall into step with the thread.
                time.sleep(pause * (0.5 + random.random()))  # noqa: S311
                pause = min(pause * _GROWTH, _LAST_PAUSE_S)
            else:
                self._target.check()
                time.sleep(_FIRST_PAUSE_S)
            if time.monotonic() > deadline:
                did = "it was in a signal handler" if self._in_handler else self._why
                why = f"the main thread of process {self._target.pid} did not get to Python code in time: {did}"
                raise TargetTimeout(f"{why}. Nothing was put into it", hint=_SLEEPS)

    def _acted(self, tid: int, good: Callable[[Stop], bool], act: Callable[[Stop], None]) -> bool:
        acted = False
        try:
            with thread_stopped(tid) as stop:
                if stop is not None and good(stop):
                    act(stop)
                    acted = True
        except ProcessGone:
            # Perhaps only the thread has ended.
            self._target.check()
            return False
        if stop is None and is_traced(tid):
            self._why = "another process traced it"
        if stop is not None:
            self.stops_us.append((stop.until - stop.since) * 1e6)
        return acted

    def _main_running(self) -> int | None:
        state = parse_stat(self._target.read("stat", 4096)).state
        if state == "R":
            self._why = "it executed C code, or a system call"
            return self._target.pid
        self._why = _STATES.get(state, f"its state was {state}")
        return None

    def _running(self) -> int | None:
        """Returns a thread that executes code or waits for a CPU, the main thread first."""
        if (main := self._main_running()) is not None:
            return main
        threads = sorted(int(name) for name in os.listdir(f"/proc/{self._target.pid}/task"))  # noqa: PTH208
        for tid in threads[:_MOST_THREADS]:
            with suppress(OSError, ProbingError), open(f"/proc/{self._target.pid}/task/{tid}/stat", "rb") as file:
                if parse_stat(file.read(4096)).state == "R":
                    return tid
        return None

    def _evaluates(self, stop: Stop) -> bool:
        if not (self._is_free(stop) if self._lock else self._is_in_loop(stop)):
            return False
        if self._handles_signal(int(stop.registers.rsp)):
            self._in_handler = True
            return False
        return not stop.is_restartable_sequence()

    def _is_in_loop(self, stop: Stop) -> bool:
        return bool(self._functions.loop <= stop.registers.rip < self._functions.loop_end)

    def _is_free(self, stop: Stop) -> bool:
        program = self._program
        inside = program is not None and program.start <= stop.registers.rip < program.end
        return inside and is_unlocked(self._memory, self._lock)

    def _handles_signal(self, stack: int) -> bool:
        """Returns whether a signal handler runs: whether the kernel put a signal frame on the stack, above ``stack``.

        Frames of our own earlier calls do not count: they have flags that the kernel never writes.
        """
        mapping = next((m for m in self._maps if stack < m.end), None)
        if mapping is None:
            return True
        start = stack & -8
        data = self._memory.read_many([(start, min(mapping.end - start, _MOST_STACK))])[0]
        if data is None:
            return True
        word, at = struct.pack("<Q", self._restorer), -1
        while (at := data.find(word, at + 1)) >= 0:
            if at % 8 == 0 and at + _SEGMENT + 2 <= len(data) and _is_frame(data, at):
                return True
        return False


def _is_frame(data: bytes, at: int) -> bool:
    (link,) = struct.unpack_from("<Q", data, at + _LINK)
    (flags,) = struct.unpack_from("<i", data, at + _STACK_FLAGS)
    (segment,) = struct.unpack_from("<H", data, at + _SEGMENT)
    return bool(link == 0 and segment == _CODE_SEGMENT and flags != _OURS)
