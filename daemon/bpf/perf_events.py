"""Opens perf events on single CPUs. Layout: include/uapi/linux/perf_event.h."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
from pathlib import Path

__all__ = ("ATTR_SIZE", "enable", "online_cpus", "perf_event_open", "run_program", "set_program")

ATTR_SIZE = 112
"""Bytes of struct perf_event_attr that we fill; kernels accept the size of each older version of the struct."""

_NUMBER = {"x86_64": 298, "aarch64": 241}
_FD_CLOEXEC = 8
_IOC_SET_BPF, _IOC_ENABLE = 0x40042408, 0x2400


def online_cpus() -> list[int]:
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        with contextlib.suppress(ValueError):
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def perf_event_open(attributes: bytes, cpu: int, pid: int = -1) -> int:
    """Returns the descriptor of an event for all processes on ``cpu``, or for ``pid`` on all CPUs (-1).

    Raises OSError (ENODEV: the CPU is offline).
    """
    buffer = ctypes.create_string_buffer(attributes.ljust(ATTR_SIZE, b"\0"), ATTR_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(_NUMBER[platform.machine()], buffer, pid, cpu, -1, ctypes.c_ulong(_FD_CLOEXEC)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def set_program(event: int, program: int) -> None:
    """Runs ``program`` at each overflow while the event is open. Raises OSError."""
    fcntl.ioctl(event, _IOC_SET_BPF, program)


def enable(event: int) -> None:
    """Starts the event. Raises OSError."""
    fcntl.ioctl(event, _IOC_ENABLE, 0)


def run_program(event: int, program: int) -> int:
    """Sets ``program`` for ``event``, enables the event and returns its descriptor. Raises OSError; then the event is
    closed.
    """
    try:
        set_program(event, program)
        enable(event)
    except OSError:
        os.close(event)
        raise
    return event
