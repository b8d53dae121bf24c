"""Finds the PyThreadState of each thread for the sampler's maps: the reader's request ``threads``.

A scan reads no frames, and reads the ranges of the last scan in one call, so a scan of hundreds of threads is cheap.
This module runs in a reader, and imports nothing large.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from probing.api.errors import CorruptTarget, ProcessGone
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import Memory, ProcessMemory, Range
from probing.daemon.processes.procfs import clean_text, parse_status
from probing.daemon.python_stack.walk.capture import checked_layout, parse_request
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.snapshot import Snapshot
from probing.daemon.python_stack.walk.threads import MAX_THREADS, KernelThread, check_process, match_threads
from probing.daemon.python_stack.walk.walker import Limits, RawThread, Walker

__all__ = ("answer_threads", "checked_request", "read_file", "scan_threads")

_ATTEMPTS = 3
_MAX_PROCESSES = 64
_MAX_USED = 16_384
# The pause before a thread's name is read again, s: each read opens a file in /proc.
_NAME_S = 60.0


@dataclass(slots=True)
class _Known:
    """Hints for the next scan: the ranges of the last scan, and (own tid, name, time of the read) of each thread."""

    used: list[Range] = field(default_factory=list)
    names: dict[int, tuple[int, str, float]] = field(default_factory=dict)


_processes: OrderedDict[tuple[int, int], _Known] = OrderedDict()


class _Lists(Walker):
    """Walks the lists of interpreters and threads, without frames. ``interpreters``: their addresses, newest first."""

    interpreters: list[int]

    def _interpreters(self, address: int) -> list[int]:
        self.interpreters = super()._interpreters(address)
        return self.interpreters

    def _through_cframes(self, threads: list[RawThread], tops: list[int]) -> list[int]:  # noqa: ARG002
        return tops

    def _frames(self, threads: list[RawThread], tops: list[int]) -> None:
        """Reads nothing, because no frames are wanted."""


def answer_threads(request: Header) -> Message:
    """Answers ``threads`` {pid, start_ns, runtime, timeout_ms} with the result of ``scan_threads`` as header.

    Raises UsageError, and the errors of ``scan_threads``.
    """
    pid, start_ns, runtime, deadline = checked_request(request)
    return Message(scan_threads(pid, start_ns, runtime, deadline))


def scan_threads(
    pid: int, start_ns: int, runtime: RuntimeInfo, deadline: float, memory: Memory | None = None
) -> Header:
    """Returns every thread of a process, and the place of its GIL.

    ``{"threads": [[tid, state, thread_id, name], ...], "gil": address, "complete"}``: ``tid`` as the host sees it;
    ``state``, the address of its PyThreadState, and ``thread_id``, its pthread_self(), are 0 for a thread without
    Python. ``gil`` is the address of the pointer to the holder (up to 3.11), or of the main interpreter's GIL (3.12+),
    or 0. ``complete`` is False when threads may be missing.

    ``deadline`` is on time.monotonic(). Raises ProcessGone, PrivilegeError, TargetTimeout, UnsupportedTarget, and
    CorruptTarget if ``runtime`` does not belong to the process.
    """
    memory = memory or ProcessMemory(pid)
    layout, _ = checked_layout(pid, runtime, memory)
    known = _remembered(pid, start_ns)
    for _ in range(_ATTEMPTS):
        snapshot = Snapshot(memory)
        snapshot.load(known.used)
        walker = _Lists(snapshot, layout, Limits(), deadline)
        threads = walker.walk(runtime.runtime)
        known.used = list(snapshot.used)[:_MAX_USED]
        if walker.complete:
            break
    kernel = _kernel_threads(pid, known)
    states = _states(threads, match_threads(threads, kernel))
    return {
        "threads": [[k.tid, *states.get(k.tid, (0, 0)), k.name] for k in kernel],
        "gil": _gil(runtime.runtime, layout, walker.interpreters, snapshot),
        "complete": walker.complete,
    }


def checked_request(request: Header) -> tuple[int, int, RuntimeInfo, float]:
    """Parses and checks a request about a CPython process. Returns (pid, start_ns, runtime, deadline); the deadline is
    a time of time.monotonic().

    Raises UsageError for a malformed request, and ProcessGone when the pid belongs to another process.
    """
    asked = parse_request(request)
    check_process(asked.pid, asked.start_ns)
    return asked.pid, asked.start_ns, RuntimeInfo.from_dict(request.get("runtime") or {}), asked.deadline


def _remembered(pid: int, start_ns: int) -> _Known:
    known = _processes.setdefault((pid, start_ns), _Known())
    _processes.move_to_end((pid, start_ns))
    while len(_processes) > _MAX_PROCESSES:
        _processes.popitem(last=False)
    return known


def _states(threads: list[RawThread], tids: list[int | None]) -> dict[int, tuple[int, int]]:
    """Returns the (address, thread_id) of one PyThreadState for each tid. If a thread has several states, this is the
    state that holds the GIL. If none of them holds the GIL, it is the state in the oldest interpreter.
    """
    states: dict[int, tuple[int, int]] = {}
    for holds in (False, True):
        for thread, tid in zip(threads, tids, strict=True):
            if tid is not None and (thread.gil is True) >= holds:
                states[tid] = (thread.address, thread.thread_id)
    return states


def _gil(runtime: int, layout: Layout, interpreters: list[int], snapshot: Snapshot) -> int:
    if layout.runtime_current is not None:
        return runtime + layout.runtime_current
    if layout.interp_gil is None or not interpreters:
        return 0
    # CPython puts new interpreters first (Python/pystate.c), so the main interpreter is the last.
    return snapshot.word(interpreters[-1] + layout.interp_gil) or 0


def _kernel_threads(pid: int, known: _Known) -> list[KernelThread]:
    status = parse_status(read_file(f"/proc/{pid}/status"))
    namespaced = len(status.get("NSpid") or ()) > 1
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            tids = sorted((int(e.name) for e in entries), key=lambda tid: (tid != pid, tid))[:MAX_THREADS]
    except OSError as e:
        raise ProcessGone(f"process {pid} exited") from e
    now = time.monotonic()
    names = {}
    for tid in tids:
        cached = known.names.get(tid)
        if cached is None or now - cached[2] > _NAME_S:
            try:
                names[tid] = _thread(pid, tid, namespaced, now)
            except (CorruptTarget, ProcessGone):
                continue  # the thread ended after it was listed
        else:
            names[tid] = cached
    known.names = names
    return [KernelThread(tid, own, name, "") for tid, (own, name, _) in names.items()]


def _thread(pid: int, tid: int, namespaced: bool, now: float) -> tuple[int, str, float]:
    folder = f"/proc/{pid}/task/{tid}"
    own = parse_status(read_file(f"{folder}/status")).get("NSpid", [tid])[-1] if namespaced else tid
    return own, clean_text(read_file(f"{folder}/comm").rstrip(b"\n"), 64), now


def read_file(path: str) -> bytes:
    """Returns at most 16 KiB of a file in /proc. Raises ProcessGone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 16_384)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessGone(f"{path} is gone") from e
