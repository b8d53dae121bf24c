"""Reads the stacks of threads that are off the CPU: the reader's request ``blocked``.

The programs see a thread only when it leaves the CPU. The stack of a thread that left earlier is read by a reader.
Equal counts of context switches before and after the read prove that the thread did not run meanwhile. This module runs
in a reader, and imports nothing heavy.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from probing.api.errors import InternalError, ProcessGone, UsageError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.python_stack.sampling.thread_states import checked_request, read_file
from probing.daemon.python_stack.walk.capture import checked_layout
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.snapshot import Snapshot
from probing.daemon.python_stack.walk.walker import Limits, RawFrame, RawThread, Walker

__all__ = ("MAX_BLOCKED", "MAX_FRAMES", "OffCpuThread", "answer_blocked", "unpack_blocked")

MAX_BLOCKED = 256
MAX_FRAMES = 128
"""PYTHON_FRAMES of bpf/python.bpf.h."""
_STATUS = re.compile(rb"^State:\t(\w)|^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)
_AWAY = frozenset({b"S", b"D", b"T", b"t"})


class OffCpuThread(NamedTuple):
    """A thread that left the CPU at its ``switches``-th context switch, at ``seen_ns`` (CLOCK_MONOTONIC) or before.

    ``frames``: (address of the code object, offset of the instruction in bytes), innermost first, as
    bpf/python_walk.bpf.h writes them. ``cut``: outer frames are missing.
    """

    tid: int
    switches: int
    seen_ns: int
    cut: bool
    frames: list[tuple[int, int]]


class _Chosen(Walker):
    """Walks only the threads ``wanted`` (address, thread_id)."""

    def __init__(self, snapshot: Snapshot, layout: Layout, wanted: set[tuple[int, int]], deadline: float) -> None:
        limits = Limits(frames=MAX_FRAMES, all_frames=MAX_FRAMES * MAX_BLOCKED)
        super().__init__(snapshot, layout, limits, deadline)
        self._wanted = wanted

    def _tids(self, threads: list[RawThread]) -> None:
        """Does nothing: the tids are in the request."""

    def _through_cframes(self, threads: list[RawThread], tops: list[int]) -> list[int]:
        # A running thread may have left its C frame meanwhile, so the C frames of unwanted threads are not read.
        pairs = zip(threads, tops, strict=True)
        return super()._through_cframes(threads, [top if self._is_wanted(thread) else 0 for thread, top in pairs])

    def _frames(self, threads: list[RawThread], tops: list[int]) -> None:
        pairs = zip(threads, tops, strict=True)
        super()._frames(threads, [top if self._is_wanted(thread) else 0 for thread, top in pairs])

    def _is_wanted(self, thread: RawThread) -> bool:
        return (thread.address, thread.thread_id) in self._wanted


def answer_blocked(request: Header) -> Message:
    """Answers ``blocked`` {pid, start_ns, runtime, threads, frames, timeout_ms}.

    ``threads``: at most 256 of [tid, address of its PyThreadState, thread_id], from an answer to the request
    ``threads``. The payload is JSON, ``[[tid, switches, seen_ns, cut, [[code, offset], ...]], ...]``, an
    ``OffCpuThread`` for each thread that did not run while it was read. Without ``frames`` no memory of the process is
    read.

    Raises ProcessGone, PrivilegeError, TargetTimeout, UnsupportedTarget, CorruptTarget and UsageError.
    """
    pid, _, runtime, deadline = checked_request(request)
    threads = _asked(request.get("threads"))
    before = _look(pid, (tid for tid, _, _ in threads))
    seen_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    if request.get("frames"):
        memory = ProcessMemory(pid)
        layout, _ = checked_layout(pid, runtime, memory)
        still = [thread for thread in threads if thread[0] in before]
        walked = _walk(memory, layout, runtime.runtime, still, deadline)
        after = _look(pid, before)
    else:
        walked, after = {tid: (False, []) for tid in before}, before
    rows = [[t, before[t], seen_ns, *what] for t, what in walked.items() if after.get(t) == before[t]]
    return Message({}, json.dumps(rows, separators=(",", ":")).encode())


def unpack_blocked(answer: Message) -> list[OffCpuThread]:
    """Decodes the answer of ``answer_blocked``. Raises InternalError if the answer is malformed."""
    try:
        return [
            OffCpuThread(int(tid), int(switches), int(seen_ns), bool(cut), [(int(c), int(o)) for c, o in frames])
            for tid, switches, seen_ns, cut, frames in json.loads(answer.payload)
        ]
    except (TypeError, ValueError) as e:
        raise InternalError("a reader's answer contains no blocked threads") from e


def _asked(threads: Any) -> list[tuple[int, int, int]]:
    if not isinstance(threads, list) or len(threads) > MAX_BLOCKED:
        raise UsageError(f"a request for blocked threads names at most {MAX_BLOCKED} threads")
    try:
        return [(int(tid), int(state), int(thread_id)) for tid, state, thread_id in threads]
    except (TypeError, ValueError) as e:
        raise UsageError("each thread must be [tid, address of its PyThreadState, thread_id]") from e


def _look(pid: int, tids: Iterable[int]) -> dict[int, int]:
    """Returns the number of context switches by tid, without threads that run, wait for a CPU, or ended."""
    switches = {}
    for tid in tids:
        try:
            status = read_file(f"/proc/{pid}/task/{tid}/status")
        except ProcessGone:
            continue
        parts = _STATUS.findall(status)
        if len(parts) == 3 and parts[0][0] in _AWAY:
            switches[tid] = int(parts[1][1]) + int(parts[2][1])
    return switches


def _walk(
    memory: Memory, layout: Layout, runtime: int, threads: list[tuple[int, int, int]], deadline: float
) -> dict[int, tuple[bool, list[tuple[int, int]]]]:
    """Returns by tid whether the stack was cut, and the frames. Threads whose PyThreadState is gone are left out."""
    tids = {(state, thread_id): tid for tid, state, thread_id in threads}
    walker = _Chosen(Snapshot(memory), layout, set(tids), deadline)
    stacks = {}
    for thread in walker.walk(runtime) if tids else ():
        tid = tids.get((thread.address, thread.thread_id))
        if tid is not None:
            stacks[tid] = (not thread.complete, [_frame(layout, frame) for frame in thread.frames])
    return stacks


def _frame(layout: Layout, frame: RawFrame) -> tuple[int, int]:
    if layout.code_adaptive is not None:
        offset = frame.instr - frame.code - layout.code_adaptive
    else:
        offset = frame.instr * 2 if layout.instr == "lasti_units" else frame.instr
    # The programs keep the offset as an int of 32 bits.
    return frame.code, (offset + (1 << 31) & (1 << 32) - 1) - (1 << 31)
