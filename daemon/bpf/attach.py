"""Attaches a program to user code: by one uprobe_multi link, or by perf events where the kernel lacks it.

A probe belongs to an inode, and so to every process that maps it. The file is named through our own descriptor, so no
other file can take its place between reading and attaching.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.perf_events import ATTR_SIZE, enable, perf_event_open, set_program

__all__ = ("attach_multi", "attach_perf", "attach_perf_by_ioctl", "refused")


def attach_multi(
    program: int, fd: int, offsets: Sequence[int], cookies: Sequence[int], on_return: bool, pid: int = 0
) -> int:
    """Returns the descriptor of one link for all offsets. Raises OSError."""
    path = f"/proc/self/fd/{fd}"
    return syscalls.link_uprobe_multi(program, path, offsets, cookies, on_return=on_return, pid=pid)


def attach_perf(program: int, fd: int, offset: int, cookie: int, on_return: bool, pid: int = 0) -> int:
    """Returns the descriptor of a link for one offset. Raises OSError."""
    event = _open_event(fd, offset, on_return, pid)
    try:
        return syscalls.link_perf_event(program, event, cookie)
    finally:
        os.close(event)


def attach_perf_by_ioctl(program: int, fd: int, offset: int, on_return: bool, pid: int = 0) -> int:
    """Returns the event's descriptor; kernels before 5.15 cannot pin it, so the probe ends with it. Raises OSError."""
    event = _open_event(fd, offset, on_return, pid)
    try:
        set_program(event, program)
        enable(event)
    except OSError:
        os.close(event)
        raise
    return event


def refused(error: OSError, what: str) -> AttachError | PrivilegeError:
    """Maps the error of a failed attachment to one of the tree."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(f"{what}: the kernel refuses ({error.strerror})")
    return AttachError(f"{what}: {error.strerror}")


def _open_event(fd: int, offset: int, on_return: bool, pid: int) -> int:
    """Opens an event of the uprobe PMU for ``pid``, or for all processes (0); one CPU stands for all, as in libbpf."""
    pmu = Path("/sys/bus/event_source/devices/uprobe")
    try:
        kind = int((pmu / "type").read_text())
        bit = int((pmu / "format/retprobe").read_text().strip().removeprefix("config:"))
    except (FileNotFoundError, ValueError) as e:
        raise OSError(errno.ENODEV, "the kernel has no uprobes for perf") from e
    path = ctypes.create_string_buffer(f"/proc/self/fd/{fd}".encode())
    config = 1 << bit if on_return else 0
    attributes = struct.pack("<IIQQQQQIIQQ", kind, ATTR_SIZE, config, 0, 0, 0, 0, 0, 0, ctypes.addressof(path), offset)
    return perf_event_open(attributes, -1, pid) if pid else perf_event_open(attributes, 0)
