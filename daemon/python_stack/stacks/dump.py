"""Reads the Python stacks of one process: the reader's request ``stacks``.

This runs in a reader: it imports nothing large, opens no file of the target, and never stops or signals it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict
from weakref import WeakKeyDictionary

from probing.api.errors import CorruptTarget, UnsupportedTarget
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.python_stack.stacks.thread_names import KnownNames, thread_names
from probing.daemon.python_stack.values.frames import LocalsReader
from probing.daemon.python_stack.values.layout import object_layout
from probing.daemon.python_stack.walk.capture import Capture, Prepared, capture, forget, parse_request, prepared
from probing.daemon.python_stack.walk.codes import Code
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.threads import KernelThread, check_process, match_threads, read_threads
from probing.daemon.python_stack.walk.walker import RawFrame, RawThread
from probing.daemon.stack_wire import Frame, Thread, pack

__all__ = ("StackDump", "dump_stacks", "handlers")

# The maximum number of threads of one process in a dump. Their frames must fit into a message, too.
MAX_SHOWN = 2048


class StackDump(TypedDict):
    """A dump. ``threads``: the main thread first. ``left_out``: the number of further threads. ``reads``: the number of
    process_vm_readv calls."""

    threads: list[Thread]
    left_out: int
    reads: int
    bytes: int
    duration_ns: int


@dataclass(slots=True)
class _Shown:
    """The last dump of a process. If nothing has changed, the next dump shares the frames of this dump, as objects."""

    names: KnownNames = field(default_factory=KnownNames)
    threads: tuple[Capture, dict[int, Thread]] | None = None
    packed: tuple[list[Thread], bytes] | None = None


_shown_of: WeakKeyDictionary[Prepared, _Shown] = WeakKeyDictionary()


def dump_stacks(
    pid: int,
    start_ns: int,
    runtime: RuntimeInfo,
    deadline: float,
    memory: Memory | None = None,
    *,
    with_locals: bool = False,
) -> StackDump:
    """Returns all threads of a process with their Python stacks, whether they run, sleep, are stopped or are in C code.

    A thread that runs no Python has no frames. ``with_locals`` adds the variables of each frame, see ``values.frames``.

    ``deadline`` is a time of time.monotonic(). Stacks read after the deadline are incomplete. Raises ProcessGone,
    PrivilegeError, TargetTimeout, UnsupportedTarget, and CorruptTarget if ``runtime`` does not belong to the process,
    for example after an exec.
    """
    return _dump(pid, start_ns, runtime, deadline, memory, with_locals=with_locals)[0]


def _dump(
    pid: int, start_ns: int, runtime: RuntimeInfo, deadline: float, memory: Memory | None, *, with_locals: bool
) -> tuple[StackDump, _Shown]:
    began = time.monotonic_ns()
    if memory is None:
        memory = ProcessMemory(pid, max_calls=40_000, max_bytes=96 << 20) if with_locals else ProcessMemory(pid)
    check_process(pid, start_ns)
    kernel = read_threads(pid)
    process = prepared(pid, start_ns, runtime, memory)
    shown = _shown_of.setdefault(process, _Shown())
    try:
        captured = capture(memory, runtime.runtime, process.layout, deadline, process.known)
    except CorruptTarget:
        forget(pid, start_ns)
        raise
    reader = _locals_reader(memory, process, captured, deadline) if with_locals else None
    listed = len(kernel)
    kernel = _selected(captured, kernel)
    threads = (
        _cached_threads(shown, captured, process.layout, kernel)
        if reader is None
        else _threads(captured, process.layout, kernel, reader)
    )
    _rename(threads, _names(memory, process, shown.names, captured, kernel, deadline))
    check_process(pid, start_ns)
    dump: StackDump = {
        "threads": threads,
        "left_out": listed - len(threads),
        "reads": memory.calls,
        "bytes": memory.bytes_read,
        "duration_ns": time.monotonic_ns() - began,
    }
    return dump, shown


def handlers() -> dict[str, Callable[[Header], Message]]:
    """Returns the handler of the reader's request ``stacks`` {pid, start_ns, runtime, timeout_ms, locals}.

    The header has ``left_out``, ``reads``, ``bytes`` and ``duration_ns``; the payload is for ``stack_wire.threads_of``.
    """
    return {"stacks": _stacks}


def _stacks(request: Header) -> Message:
    asked = parse_request(request)
    runtime = RuntimeInfo.from_dict(request.get("runtime") or {})
    with_locals = bool(request.get("locals"))
    dump, shown = _dump(asked.pid, asked.start_ns, runtime, asked.deadline, None, with_locals=with_locals)
    header = {name: value for name, value in dump.items() if name != "threads"}
    return Message(header, _packed(shown, dump["threads"]))


def _packed(shown: _Shown, threads: list[Thread]) -> bytes:
    if shown.packed is not None and _are_same(shown.packed[0], threads):
        return shown.packed[1]
    text = json.dumps(pack({"threads": threads}), separators=(",", ":")).encode()
    shown.packed = (threads, text)
    return text


def _are_same(before: list[Thread], now: list[Thread]) -> bool:
    # Frames that have not changed are the same objects (_cached_threads), so their contents need no comparison.
    return len(before) == len(now) and all(
        old["frames"] is new["frames"]
        and old["tid"] == new["tid"]
        and old["thread"] == new["thread"]
        and old["state"] == new["state"]
        for old, new in zip(before, now, strict=True)
    )


def _locals_reader(memory: Memory, process: Prepared, captured: Capture, deadline: float) -> LocalsReader:
    reader = LocalsReader(memory, object_layout(process.layout, process.head), deadline)
    reader.load(frame for thread, _ in captured.threads for frame in thread.frames)
    return reader


def _selected(captured: Capture, kernel: list[KernelThread]) -> list[KernelThread]:
    """Returns the threads that were read or run no Python. If there are too many, only threads that run no Python are
    dropped.
    """
    unread = set(match_threads(captured.unread, kernel)) if captured.unread else set()
    read = [k for k in kernel if k.tid not in unread]
    if len(read) <= MAX_SHOWN:
        return read
    ours = set(match_threads([thread for thread, _ in captured.threads], read))
    others = [k.tid for k in read if k.tid not in ours]
    dropped = set(others[max(0, MAX_SHOWN - len(ours)) :])
    return [k for k in read if k.tid not in dropped]


def _names(
    memory: Memory,
    process: Prepared,
    known: KnownNames,
    captured: Capture,
    kernel: list[KernelThread],
    deadline: float,
) -> dict[int, str]:
    """Returns the names that ``threading`` gives to threads, by tid."""
    try:
        layout = object_layout(process.layout, process.head)
    except UnsupportedTarget:
        return {}
    names = thread_names(memory, layout, process.runtime.runtime, deadline, known)
    threads = [thread for thread, _ in captured.threads]
    return {
        tid: names[thread.thread_id]
        for tid, thread in zip(match_threads(threads, kernel), threads, strict=True)
        if tid is not None and thread.thread_id in names
    }


def _rename(threads: list[Thread], names: dict[int, str]) -> None:
    for thread in threads:
        thread["thread"] = names.get(thread["tid"], thread["thread"])


def _cached_threads(shown: _Shown, captured: Capture, layout: Layout, kernel: list[KernelThread]) -> list[Thread]:
    """Returns the result of ``_threads`` without locals, which is cached for the last capture object."""
    if shown.threads is None or shown.threads[0] is not captured or shown.threads[1].keys() != {k.tid for k in kernel}:
        threads = _threads(captured, layout, kernel, None)
        shown.threads = (captured, {thread["tid"]: thread for thread in threads})
        return threads
    cached = shown.threads[1]
    return [{**cached[k.tid], "thread": k.name, "state": k.state} for k in kernel]


def _threads(
    captured: Capture, layout: Layout, kernel: list[KernelThread], reader: LocalsReader | None
) -> list[Thread]:
    by_tid: dict[int, list[tuple[RawThread, dict[int, Code]]]] = {}
    tids = match_threads([thread for thread, _ in captured.threads], kernel)
    for tid, entry in zip(tids, captured.threads, strict=True):
        if tid is not None:
            by_tid.setdefault(tid, []).append(entry)
    return [_thread(k, by_tid.get(k.tid, []), layout, captured.complete, reader) for k in kernel]


def _thread(
    kernel: KernelThread,
    entries: list[tuple[RawThread, dict[int, Code]]],
    layout: Layout,
    complete: bool,
    reader: LocalsReader | None,
) -> Thread:
    # A thread has a state in each interpreter that it entered; the state in the newest interpreter is listed first.
    frames: list[Frame] = []
    lines: dict[tuple[int, int], int | None] = {}
    for thread, codes in entries:
        complete = thread.complete and (complete or bool(thread.frames))
        for frame in thread.frames:
            code = codes.get(frame.code)
            complete = complete and code is not None and not code.cut
            frames.append(_frame(frame, code, layout, lines))
            if reader is not None:
                frames[-1]["locals"] = reader.read(frame)
    gils = [thread.gil for thread, _ in entries]
    return {
        "tid": kernel.tid,
        "thread": kernel.name,
        "state": kernel.state,
        "gil": True if True in gils else None if None in gils else False,
        "complete": complete,
        "frames": frames,
    }


def _frame(frame: RawFrame, code: Code | None, layout: Layout, lines: dict[tuple[int, int], int | None]) -> Frame:
    if code is None:
        return {
            "func": "?",
            "file": "?",
            "lineno": None,
            "frame_type": "Python",
            "ip": frame.code,
            "entry": frame.entry,
        }
    key = (frame.code, frame.instr)
    if key not in lines:
        lines[key] = code.line(layout, frame)
    return {
        "func": code.func,
        "file": code.file,
        "lineno": lines[key],
        "frame_type": "Python",
        "ip": frame.instr if layout.code_adaptive is not None else frame.code,
        "entry": frame.entry,
    }
