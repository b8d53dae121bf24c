"""What a reader remembers of the CPython of each process, and requests that name such a process."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.processes.memory import Memory
from probing.daemon.python_stack.walk.capture import Known
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.locate import RuntimeInfo

__all__ = ("Asked", "Prepared", "checked_layout", "forget", "parse_request", "prepared")

_MAX_PROCESSES = 64
_DEFAULT_TIMEOUT_MS = 1000


@dataclass(eq=False)
class Prepared:
    """The CPython of one process. ``head``: the first bytes of its ``_PyRuntime`` from 3.13 on, empty before."""

    runtime: RuntimeInfo
    layout: Layout
    head: bytes
    known: Known = field(default_factory=Known)


class Asked(NamedTuple):
    """The fields that all requests about a CPython have; ``deadline`` is on time.monotonic()."""

    pid: int
    start_ns: int
    deadline: float


_processes: OrderedDict[tuple[int, int], Prepared] = OrderedDict()


def parse_request(request: dict[str, Any]) -> Asked:
    """``pid``, ``start_ns`` and ``timeout_ms`` of a request. Raises UsageError."""
    pid, start_ns = request.get("pid"), request.get("start_ns")
    timeout_ms = request.get("timeout_ms", _DEFAULT_TIMEOUT_MS)
    if not (isinstance(pid, int) and isinstance(start_ns, int) and isinstance(timeout_ms, int | float)):
        raise UsageError("a request about a CPython takes pid, start_ns and timeout_ms")
    return Asked(pid, start_ns, time.monotonic() + timeout_ms / 1000)


def prepared(pid: int, start_ns: int, runtime: RuntimeInfo, memory: Memory) -> Prepared:
    """The CPython of a process, with what earlier reads of it left. Raises like ``checked_layout``."""
    process = _processes.get((pid, start_ns))
    layout, head = checked_layout(pid, runtime, memory)
    if process is None or process.runtime != runtime or process.head != head:
        process = _processes[pid, start_ns] = Prepared(runtime, layout, head)
    _processes.move_to_end((pid, start_ns))
    while len(_processes) > _MAX_PROCESSES:
        _processes.popitem(last=False)
    return process


def checked_layout(pid: int, runtime: RuntimeInfo, memory: Memory) -> tuple[Layout, bytes]:
    """The layout of the process's CPython, and the head of its ``_PyRuntime`` from 3.13 on.

    Raises CorruptTarget when the process no longer runs the CPython that ``runtime`` describes, UnsupportedTarget,
    ProcessGone and PrivilegeError.
    """
    if runtime.version not in TABLE:
        head = memory.read_many([(runtime.runtime, DEBUG_OFFSETS_SIZE)])[0]
        changed = head is None
    else:
        head = memory.read_many([(runtime.version_at, 4)])[0] if runtime.version_at else b""
        changed = bool(runtime.version_at) and (head is None or int.from_bytes(head, "little") != runtime.hexversion)
    if changed or head is None:
        raise CorruptTarget(f"process {pid} no longer runs the CPython that was found in it")
    return layout_of(runtime.version, head), head


def forget(pid: int, start_ns: int) -> None:
    """Drop what makes the next read of a process cheap."""
    _processes.pop((pid, start_ns), None)
