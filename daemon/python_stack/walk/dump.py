"""The stacks of one process as plain values, and the reader's request for them.

This runs in a reader: it imports nothing heavy, opens no file of the target, and never stops or signals it.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from probing.api.errors import CorruptTarget, UnsupportedTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.python_stack.values.layout import object_layout
from probing.daemon.python_stack.values.locals import LocalsReader
from probing.daemon.python_stack.walk.capture import Capture, Known, capture
from probing.daemon.python_stack.walk.codes import Code
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.thread_names import KnownNames, thread_names
from probing.daemon.python_stack.walk.threads import KernelThread, check_process, match_threads, read_threads
from probing.daemon.python_stack.walk.walker import RawFrame, RawThread
from probing.daemon.stack_wire import pack

__all__ = ("Process", "dump_stacks", "forget", "handlers", "prepared")

_MAX_PROCESSES = 64
_DEFAULT_TIMEOUT_MS = 1000
# Of one process, so that there is room for their frames in a message.
MAX_SHOWN = 2048


@dataclass(slots=True)
class Process:
    """What is known of a process that was read. ``head``: the begin of its ``_PyRuntime``, from 3.13 on."""

    runtime: RuntimeInfo
    layout: Layout
    head: bytes
    known: Known = field(default_factory=Known)
    names: KnownNames = field(default_factory=KnownNames)
    told: tuple[Capture, dict[int, dict[str, Any]]] | None = None
    text: tuple[list[dict[str, Any]], bytes] | None = None


_processes: OrderedDict[tuple[int, int], Process] = OrderedDict()


def dump_stacks(
    pid: int,
    start_ns: int,
    runtime: RuntimeInfo,
    deadline: float,
    memory: Memory | None = None,
    *,
    with_locals: bool = False,
) -> dict[str, Any]:
    """Every thread of a process with its Python stack, read while it runs, sleeps, is stopped or sits in C.

    ``{"threads": [{"tid", "thread", "state", "gil", "complete", "frames": [{"func", "file", "lineno", "frame_type",
    "ip", "entry"}]}], "left_out", "reads", "bytes", "duration_ns"}``; the main thread first, frames innermost first.
    ``entry``: the frame is the first of its run of the C interpreter loop. A thread without
    Python frames has none; ``gil`` and ``lineno`` are None when they cannot be known. ``complete`` is False for a stack
    that changed while it was read, or was cut. ``left_out``: how many threads there are beside these. ``reads`` counts
    process_vm_readv calls. ``with_locals`` adds to each frame ``"locals": [{"name", "type", "value", "number",
    "reason"}]``, see ``values.locals``.

    ``deadline`` is on time.monotonic(): stacks are then incomplete. Raises ProcessGone, PrivilegeError, TargetTimeout,
    UnsupportedTarget, and CorruptTarget when ``runtime`` does not hold for the process (it may have called exec).
    """
    began = time.monotonic_ns()
    if memory is None:
        memory = ProcessMemory(pid, max_calls=40_000, max_bytes=256 << 20) if with_locals else ProcessMemory(pid)
    check_process(pid, start_ns)
    kernel = read_threads(pid)
    process = prepared(pid, start_ns, runtime, memory)
    try:
        found = capture(memory, runtime.runtime, process.layout, deadline, process.known)
    except CorruptTarget:
        _processes.pop((pid, start_ns), None)
        raise
    reader = _locals_reader(memory, process, found, deadline) if with_locals else None
    listed = len(kernel)
    kernel = _shown(found, kernel)
    threads = _told(process, found, kernel) if reader is None else _threads(found, process.layout, kernel, reader)
    _rename(threads, _names(memory, process, found, kernel, deadline))
    check_process(pid, start_ns)
    return {
        "threads": threads,
        "left_out": listed - len(threads),
        "reads": memory.calls,
        "bytes": memory.bytes_read,
        "duration_ns": time.monotonic_ns() - began,
    }


def forget(pid: int, start_ns: int) -> None:
    """Drop what makes the next dump of a process cheap."""
    _processes.pop((pid, start_ns), None)


def handlers() -> dict[str, Callable[[dict[str, Any]], Message]]:
    """What a reader answers: ``stacks`` {pid, start_ns, runtime, timeout_ms, locals}, as ``wire.threads_of`` reads it.

    The header has ``left_out``, ``reads``, ``bytes`` and ``duration_ns``, the payload is JSON that nobody needs to read
    on its way.
    """
    return {"stacks": _stacks}


def _stacks(request: dict[str, Any]) -> Message:
    pid, start_ns = request.get("pid"), request.get("start_ns")
    timeout_ms = request.get("timeout_ms", _DEFAULT_TIMEOUT_MS)
    if not (isinstance(pid, int) and isinstance(start_ns, int) and isinstance(timeout_ms, int | float)):
        raise UsageError("a request for stacks takes pid, start_ns and timeout_ms")
    runtime = RuntimeInfo.from_dict(request.get("runtime") or {})
    deadline = time.monotonic() + timeout_ms / 1000
    dump = dump_stacks(pid, start_ns, runtime, deadline, with_locals=bool(request.get("locals")))
    header = {name: dump[name] for name in ("left_out", "reads", "bytes", "duration_ns")}
    return Message(header, _text(_processes.get((pid, start_ns)), dump))


def _text(process: Process | None, dump: dict[str, Any]) -> bytes:
    threads = dump["threads"]
    if process is not None and process.text is not None and _are_same(process.text[0], threads):
        return process.text[1]
    packed = pack(dump)
    text = json.dumps({name: packed[name] for name in ("threads", "codes")}, separators=(",", ":")).encode()
    if process is not None:
        process.text = (threads, text)
    return text


def _are_same(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    # The frames of a process that stands still are the very same objects (_told): no need to look into them.
    return len(before) == len(now) and all(
        old["frames"] is new["frames"] and all(old[name] == new[name] for name in ("tid", "thread", "state"))
        for old, new in zip(before, now, strict=True)
    )


def prepared(pid: int, start_ns: int, runtime: RuntimeInfo, memory: Memory) -> Process:
    """What is known of the process; checks that its CPython still is the one that was found before."""
    process = _processes.get((pid, start_ns))
    if runtime.version in TABLE:
        ranges = [(runtime.version_at, 4)] if runtime.version_at else []
    else:
        ranges = [(runtime.runtime, DEBUG_OFFSETS_SIZE)]
    head = memory.read_many(ranges)[0] if ranges else b""
    if head is None or (runtime.version_at and len(head) == 4 and int.from_bytes(head, "little") != runtime.hexversion):
        raise CorruptTarget(f"process {pid} does not run the CPython that it ran before")
    if process is None or process.runtime != runtime or process.head != head:
        process = Process(runtime, layout_of(runtime.version, head), head)
        _processes[pid, start_ns] = process
    _processes.move_to_end((pid, start_ns))
    while len(_processes) > _MAX_PROCESSES:
        _processes.popitem(last=False)
    return process


def _locals_reader(memory: Memory, process: Process, found: Capture, deadline: float) -> LocalsReader:
    reader = LocalsReader(memory, object_layout(process.layout, process.head), deadline)
    reader.load(frame for thread, _ in found.threads for frame in thread.frames)
    return reader


def _shown(found: Capture, kernel: list[KernelThread]) -> list[KernelThread]:
    """The threads that were read, or that run no Python; of too many the ones that do."""
    unread = set(match_threads(found.unread, kernel)) if found.unread else set()
    read = [k for k in kernel if k.tid not in unread]
    if len(read) <= MAX_SHOWN:
        return read
    ours = set(match_threads([thread for thread, _ in found.threads], read))
    others = [k.tid for k in read if k.tid not in ours]
    dropped = set(others[max(0, MAX_SHOWN - len(ours)) :])
    return [k for k in read if k.tid not in dropped]


def _names(
    memory: Memory, process: Process, found: Capture, kernel: list[KernelThread], deadline: float
) -> dict[int, str]:
    """What Python calls its threads, by tid."""
    try:
        layout = object_layout(process.layout, process.head)
    except UnsupportedTarget:
        return {}
    names = thread_names(memory, layout, process.runtime.runtime, deadline, process.names)
    threads = [thread for thread, _ in found.threads]
    return {
        tid: names[thread.thread_id]
        for tid, thread in zip(match_threads(threads, kernel), threads, strict=True)
        if tid is not None and thread.thread_id in names
    }


def _rename(threads: list[dict[str, Any]], names: dict[int, str]) -> None:
    for thread in threads:
        thread["thread"] = names.get(thread["tid"], thread["thread"])


def _told(process: Process, found: Capture, kernel: list[KernelThread]) -> list[dict[str, Any]]:
    """As ``_threads``, but what was told of the very same capture is not made again."""
    if process.told is None or process.told[0] is not found or process.told[1].keys() != {k.tid for k in kernel}:
        threads = _threads(found, process.layout, kernel, None)
        process.told = (found, {thread["tid"]: thread for thread in threads})
        return threads
    told = process.told[1]
    return [{**told[k.tid], "thread": k.name, "state": k.state} for k in kernel]


def _threads(
    found: Capture, layout: Layout, kernel: list[KernelThread], reader: LocalsReader | None
) -> list[dict[str, Any]]:
    by_tid: dict[int, list[tuple[RawThread, dict[int, Code]]]] = {}
    tids = match_threads([thread for thread, _ in found.threads], kernel)
    for tid, entry in zip(tids, found.threads, strict=True):
        if tid is not None:
            by_tid.setdefault(tid, []).append(entry)
    return [_thread(k, by_tid.get(k.tid, []), layout, found.complete, reader) for k in kernel]


def _thread(
    kernel: KernelThread,
    entries: list[tuple[RawThread, dict[int, Code]]],
    layout: Layout,
    complete: bool,
    reader: LocalsReader | None,
) -> dict[str, Any]:
    # A thread that entered another interpreter has a state in each; the newest interpreter is listed first.
    frames: list[dict[str, Any]] = []
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


def _frame(
    frame: RawFrame, code: Code | None, layout: Layout, lines: dict[tuple[int, int], int | None]
) -> dict[str, Any]:
    if code is None:
        unknown = {"func": "?", "file": "?", "lineno": None, "frame_type": "Python"}
        return {**unknown, "ip": frame.code, "entry": frame.entry}
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
