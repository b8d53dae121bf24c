"""Placing a loaded program: on a function of a file in one process or in all, or on a tracepoint.

By perf events: they end with their descriptor, so nothing of a user's probe outlives the collector.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf.perf_events import ATTR_SIZE, enable, set_program

__all__ = ("ALL", "attach_function", "attach_tracepoint")

ALL = -1
"""As a pid: every process that maps the file."""
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_FD_CLOEXEC = 8
_TYPE_TRACEPOINT = 2
_UPROBES = Path("/sys/bus/event_source/devices/uprobe")
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


def attach_function(program: int, fd: int, offset: int, pid: int, *, on_return: bool) -> int:
    """The event's descriptor. ``offset`` is in the file open at ``fd``; of a ``pid`` all threads are meant, and no
    other process meets a breakpoint (kernel/trace/trace_uprobe.c, uprobe_perf_filter).

    Raises AttachError, PrivilegeError.
    """
    try:
        kind = int((_UPROBES / "type").read_text())
        bit = int((_UPROBES / "format/retprobe").read_text().strip().removeprefix("config:"))
    except (OSError, ValueError) as e:
        raise AttachError("the kernel has no uprobes for perf events") from e
    path = ctypes.create_string_buffer(f"/proc/self/fd/{fd}".encode())
    config = 1 << bit if on_return else 0
    attributes = struct.pack("<IIQQQQQIIQQ", kind, ATTR_SIZE, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(path), offset)
    return _placed(program, attributes, pid, -1 if pid != ALL else 0)


def attach_tracepoint(program: int, name: str) -> int:
    """The event's descriptor, for all processes. ``name`` is category:name. Raises AttachError, PrivilegeError."""
    category, _, point = name.partition(":")
    for root in _TRACING:
        try:
            identity = int((root / "events" / category / point / "id").read_text())
        except (OSError, ValueError):
            continue
        attributes = struct.pack("<IIQQQQQIIQQ", _TYPE_TRACEPOINT, ATTR_SIZE, identity, 1, 0, 0, 0, 0, 0, 0, 0)
        return _placed(program, attributes, ALL, 0)
    hint = "it must be in available_events of the kernel's tracing directory, and that mounted at /sys/kernel/tracing"
    raise AttachError(f"there is no tracepoint {name}", hint=hint)


def _placed(program: int, attributes: bytes, pid: int, cpu: int) -> int:
    buffer = ctypes.create_string_buffer(attributes.ljust(ATTR_SIZE, b"\0"), ATTR_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _PERF_EVENT_OPEN[platform.machine()]
    event = int(libc.syscall(number, buffer, pid, cpu, -1, ctypes.c_ulong(_FD_CLOEXEC)))
    try:
        if event < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        set_program(event, program)
        enable(event)
    except OSError as e:
        if event >= 0:
            os.close(event)
        if e.errno in (errno.EPERM, errno.EACCES):
            raise PrivilegeError(f"the kernel refuses to attach it ({e.strerror})") from e
        raise AttachError(f"it cannot be attached: {e.strerror}") from e
    return event
