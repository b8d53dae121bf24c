"""Copies the C stacks of a process's blocked threads without stopping them, in a reader.

The kernel reports the stack and instruction pointers of a blocked thread (``/proc/PID/task/TID/syscall``,
fs/proc/base.c). Equal pointers and equal counts of context switches before and after the copy prove that the thread did
not run meanwhile, so its registers, its copied stack and its Python stack belong to one moment.
"""

from __future__ import annotations

import bisect
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from probing.api.errors import PrivilegeError, ProcessGone, TargetError, UnsupportedTarget, UsageError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps
from probing.daemon.python_stack.native.payload import (
    MAX_MAPPINGS,
    MAX_PATH,
    MAX_STACK,
    MAX_THREADS,
    Captured,
    CodeMapping,
    StackCopy,
)
from probing.daemon.python_stack.stacks.dump import dump_stacks
from probing.daemon.python_stack.walk.capture import parse_request
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.stack_wire import Thread, pack

__all__ = ("copy_stacks", "handlers")

_MAX_TOTAL = 16 << 20
_MAX_MAPS = 16 << 20
# The red zone: memory below its stack pointer that a leaf function may use (System V ABI for x86-64, 3.2.2).
_RED_ZONE = 128
# During this share of the timeout, running threads are read again every millisecond, because they often block soon.
_PATIENCE = 0.2
_MAX_ROUNDS = 20
_PAUSE_S = 0.001


class _Look(NamedTuple):
    """The kernel's report of a blocked thread. Between two equal reports the thread did not run."""

    sp: int
    pc: int
    line: bytes
    switches: tuple[bytes, ...]


def copy_stacks(
    pid: int, start_ns: int, tids: Sequence[int], runtime: RuntimeInfo | None, deadline: float
) -> tuple[Captured, dict[int, Thread]]:
    """Copies the stacks of threads ``tids`` (empty: all) and, with ``runtime``, walks their Python stacks.

    The second value has the Python stack of each thread that stayed blocked, as in ``dump_stacks``. ``deadline`` is a
    time of time.monotonic(). Raises ProcessGone, PrivilegeError, TargetTimeout, and UnsupportedTarget on machines whose
    blocked threads cannot be unwound from their stack alone.
    """
    if platform.machine() != "x86_64":
        raise UnsupportedTarget(
            f"native stacks are not read on {platform.machine()}",
            hint="ask for Python stacks only: the caller's address is in a register, which only a stop would show",
        )
    mappings = parse_maps(_read(f"/proc/{pid}/maps", _MAX_MAPS))
    copies: dict[int, StackCopy] = {}
    python: dict[int, Thread] = {}
    patience = time.monotonic() + (deadline - time.monotonic()) * _PATIENCE
    waiting = list(tids) or _threads(pid)
    for _ in range(_MAX_ROUNDS):
        copied, dumped = _round(pid, start_ns, waiting, mappings, runtime, deadline)
        copies |= copied
        python |= dumped
        waiting = [tid for tid in waiting if copies[tid].reason == "runs"]
        if not waiting or time.monotonic() + _PAUSE_S > patience:
            break
        time.sleep(_PAUSE_S)
    code = [_code(m) for m in mappings if m.executable and m.path != b"[vsyscall]"]
    return Captured(pid, start_ns, _within_bounds(copies), tuple(code[:MAX_MAPPINGS])), python


def handlers() -> dict[str, Callable[[Header], Message]]:
    """Returns the handler of the reader's request ``native`` {pid, start_ns, tids, runtime, timeout_ms}. Without
    ``tids``, all threads are read; without ``runtime``, no Python stacks.

    The payload of the answer is ``Captured.encode()``. ``python`` in the header has the Python stacks of the threads
    that did not run during the copy, packed for ``stack_wire.unpack``. It is null without ``runtime``.
    """
    return {"native": _native}


def _native(request: Header) -> Message:
    asked = parse_request(request)
    tids = request.get("tids") or []
    if not isinstance(tids, list) or len(tids) > MAX_THREADS or not all(isinstance(t, int) and t > 0 for t in tids):
        raise UsageError(f"a request for native stacks names at most {MAX_THREADS} threads by their tids")
    runtime = RuntimeInfo.from_dict(request["runtime"]) if request.get("runtime") else None
    captured, python = copy_stacks(asked.pid, asked.start_ns, tids, runtime, asked.deadline)
    return Message({"python": pack({"threads": list(python.values())}) if runtime else None}, captured.encode())


def _round(
    pid: int,
    start_ns: int,
    tids: Sequence[int],
    mappings: Sequence[Mapping],
    runtime: RuntimeInfo | None,
    deadline: float,
) -> tuple[dict[int, StackCopy], dict[int, Thread]]:
    """Reads the registers, copies the stacks, walks the Python stacks, and reads the registers again. A thread whose
    registers or counts of context switches changed gets the reason ``runs``.
    """
    before = {tid: _look(pid, tid) for tid in tids}
    still = {tid: look for tid, look in before.items() if isinstance(look, _Look)}
    copies = _copy(ProcessMemory(pid), still, mappings)
    dumped: dict[int, Thread] = {}
    if runtime is not None and any(not c.reason for c in copies.values()):
        threads = dump_stacks(pid, start_ns, runtime, deadline)["threads"]
        dumped = {t["tid"]: t for t in threads if t["tid"] in still}
    for tid, look in before.items():
        if not isinstance(look, _Look):
            copies[tid] = StackCopy(tid, reason=look)
        elif not copies[tid].reason and _look(pid, tid) != look:
            copies[tid] = StackCopy(tid, reason="runs")
    return copies, {tid: t for tid, t in dumped.items() if not copies[tid].reason}


def _copy(memory: Memory, still: dict[int, _Look], mappings: Sequence[Mapping]) -> dict[int, StackCopy]:
    starts = [m.start for m in mappings]
    ranges = {}
    for tid, look in still.items():
        mapping = mappings[max(0, bisect.bisect_right(starts, look.sp) - 1)] if mappings else None
        if mapping is not None and mapping.start <= look.sp < mapping.end:
            low = max(mapping.start, (look.sp & -8) - _RED_ZONE)
            ranges[tid] = (low, min(mapping.end - low, MAX_STACK))
    if sum(size for _, size in ranges.values()) > _MAX_TOTAL:
        share = _MAX_TOTAL // len(ranges)
        ranges = {tid: (low, min(size, share)) for tid, (low, size) in ranges.items()}
    # All ranges are read in one call, because a call costs more than reading a range.
    parts = dict(zip(ranges, memory.read_many(list(ranges.values())), strict=True))
    copies = {}
    for tid, look in still.items():
        data = parts.get(tid)
        if data is None:
            copies[tid] = StackCopy(tid, reason="refused")
        else:
            copies[tid] = StackCopy(tid, look.pc, look.sp, ranges[tid][0], data)
    return copies


def _look(pid: int, tid: int) -> _Look | str:
    """Returns the kernel's report of a blocked thread, or the reason why there is no report."""
    try:
        line = _read(f"/proc/{pid}/task/{tid}/syscall", 256)
        words = line.split()
        if words[:1] == [b"running"] or len(words) not in (3, 9):
            return "runs"
        status = _read(f"/proc/{pid}/task/{tid}/status", 16_384).splitlines()
        switches = tuple(word for word in status if word.startswith((b"voluntary_ctxt", b"nonvoluntary_ctxt")))
        return _Look(int(words[-2], 16), int(words[-1], 16), line, switches)
    except ProcessGone:
        return "gone"
    except (PrivilegeError, ValueError):
        return "refused"


def _threads(pid: int) -> list[int]:
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            return sorted(int(entry.name) for entry in entries)[:MAX_THREADS]
    except OSError as e:
        raise ProcessGone(f"process {pid} exited") from e


def _within_bounds(copies: dict[int, StackCopy]) -> tuple[StackCopy, ...]:
    left, threads = _MAX_TOTAL, []
    for tid, copy in copies.items():
        left -= len(copy.data)
        threads.append(copy if left >= 0 else StackCopy(tid, reason="limit"))
    return tuple(threads)


def _code(mapping: Mapping) -> CodeMapping:
    path = clean_text(mapping.path, MAX_PATH)
    return CodeMapping(mapping.start, mapping.end, mapping.offset, *mapping.device, mapping.inode, path)


def _read(path: str, limit: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            while limit > 0 and (part := os.read(fd, min(limit, 1 << 16))):
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessGone("the thread ended") from e
    except PermissionError as e:
        raise PrivilegeError(
            f"no permission to read {path}", hint="reading the registers of a blocked thread needs CAP_SYS_PTRACE"
        ) from e
    except OSError as e:
        raise TargetError(f"{path} cannot be read: {e.strerror}") from e
