"""Places loaded programs on a function, in one process or in all, or on a tracepoint.

The links are never pinned: they end with their descriptors, so no probe of a user outlives the collector.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from probing.api.errors import AttachError
from probing.daemon.bpf.attach import attach_multi, attach_perf_by_ioctl, refused
from probing.daemon.bpf.perf_events import ATTR_SIZE, enable, perf_event_open, set_program
from probing.daemon.user_probes.spec import Attach

__all__ = ("ALL", "attach_function", "attach_tracepoint")

ALL = 0
"""As a pid: every process that maps the file."""
_TYPE_TRACEPOINT = 2
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


def attach_function(program: int, fd: int, offset: int, pid: int, place: Attach, *, multi: bool) -> int:
    """Returns the descriptor of a link, or of a perf event where ``multi`` is False. ``offset`` is in the file
    open at ``fd``.

    With ``pid``, all its threads are probed, and no other process meets a breakpoint (kernel/trace/bpf_trace.c,
    uprobe_multi_link_filter; trace_uprobe.c, uprobe_perf_filter). Raises AttachError, PrivilegeError.
    """
    try:
        if multi:
            return attach_multi(program, fd, [offset], [0], place.on_return, pid)
        return attach_perf_by_ioctl(program, fd, offset, place.on_return, pid)
    except OSError as e:
        raise refused(e, place.where) from e


def attach_tracepoint(program: int, name: str) -> int:
    """Returns the descriptor of a perf event for all processes. ``name`` is category:name.

    Raises AttachError, PrivilegeError.
    """
    category, _, point = name.partition(":")
    for root in _TRACING:
        try:
            identity = int((root / "events" / category / point / "id").read_text())
        except (OSError, ValueError):
            continue
        attributes = struct.pack("<IIQQQQQIIQQ", _TYPE_TRACEPOINT, ATTR_SIZE, identity, 1, 0, 0, 0, 0, 0, 0, 0)
        try:
            return _placed(program, attributes)
        except OSError as e:
            raise refused(e, name) from e
    hint = "it must be in available_events of the kernel's tracing directory, and that mounted at /sys/kernel/tracing"
    raise AttachError(f"there is no tracepoint {name}", hint=hint)


def _placed(program: int, attributes: bytes) -> int:
    event = perf_event_open(attributes, 0)
    try:
        set_program(event, program)
        enable(event)
    except OSError:
        os.close(event)
        raise
    return event
