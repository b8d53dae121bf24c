"""Attaches a program to user code by one uprobe_multi link, or by perf events on kernels without uprobe_multi.

A probe belongs to an inode, and so to every process that maps it. The file is named by the path of our own descriptor,
so it cannot be replaced between reading and attaching.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from probing.api.errors import AttachError, PrivilegeError
from probing.daemon.bpf import syscalls
from probing.daemon.bpf.perf_events import ATTR_SIZE, perf_event_open, run_program

__all__ = (
    "attach_multi",
    "attach_perf",
    "attach_perf_by_ioctl",
    "attach_perf_in_map",
    "program_in_map",
    "refused",
    "wait_for_end",
)

# Prefix of the name of a map that holds a perf event; the id of the event's program follows, in hex.
_IN_MAP = "event_"
_END_S = 10.0
_POLL_S = 0.002


def attach_multi(
    program: int, fd: int, offsets: Sequence[int], cookies: Sequence[int], on_return: bool, pid: int = 0
) -> int:
    """Attaches ``program`` at all ``offsets`` by one link, and returns the link's descriptor. Raises OSError."""
    path = f"/proc/self/fd/{fd}"
    return syscalls.link_uprobe_multi(program, path, offsets, cookies, on_return=on_return, pid=pid)


def attach_perf(program: int, fd: int, offset: int, cookie: int, on_return: bool, pid: int = 0) -> int:
    """Attaches ``program`` at one offset by a link, and returns the link's descriptor. Raises OSError."""
    event = _open_event(fd, offset, on_return, pid)
    try:
        return syscalls.link_perf_event(program, event, cookie)
    finally:
        os.close(event)


def attach_perf_by_ioctl(program: int, fd: int, offset: int, on_return: bool, pid: int = 0) -> int:
    """Attaches ``program`` at one offset, and returns the descriptor of the event. Raises OSError.

    The event cannot be pinned, so the probe ends when the descriptor is closed.
    """
    return run_program(_open_event(fd, offset, on_return, pid), program)


def attach_perf_in_map(program: int, fd: int, offset: int, on_return: bool) -> int:
    """Attaches ``program`` at one offset, and returns the descriptor of a map that keeps the event open. Raises
    OSError.

    The map can be pinned like a link. The kernel ends the event 30 ms after the map is gone, on a busy machine 600 ms
    after. ``wait_for_end`` waits for this end, if nothing else uses ``program``.
    """
    event = attach_perf_by_ioctl(program, fd, offset, on_return)
    try:
        holder = syscalls.create_event_map(f"{_IN_MAP}{syscalls.program_info(program).id:x}")
        try:
            syscalls.map_update(holder, bytes(4), struct.pack("<I", event))
        except OSError:
            os.close(holder)
            raise
        return holder
    finally:
        os.close(event)


def program_in_map(fd: int) -> int | None:
    """Returns the id of the program behind a descriptor of ``attach_perf_in_map``, None for any other descriptor."""
    if str(Path(f"/proc/self/fd/{fd}").readlink()) != "anon_inode:bpf-map":
        return None
    return int(syscalls.map_info(fd).name.removeprefix(_IN_MAP), 16)


def wait_for_end(programs: Iterable[int]) -> None:
    """Waits until the programs with these ids are gone, 10 s at most. Without CAP_SYS_ADMIN it returns at once."""
    deadline = time.monotonic() + _END_S
    for program in programs:
        try:
            while (fd := syscalls.open_by_id("program", program)) is not None:
                os.close(fd)
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)
        except PermissionError:
            return


def refused(error: OSError, what: str) -> AttachError | PrivilegeError:
    """Returns the error of ``probing.api.errors`` for a failed attachment; ``what`` begins its message."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(f"{what}: the kernel refuses ({error.strerror})")
    return AttachError(f"{what}: {error.strerror}")


def _open_event(fd: int, offset: int, on_return: bool, pid: int) -> int:
    """Opens an event of the uprobe PMU for ``pid``, or for all processes (0). The event is opened on one CPU and works
    on all, as in libbpf.
    """
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
