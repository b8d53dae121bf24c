"""Processes of this machine as /proc shows them, and signals that reach only the process that was meant."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ("Clock", "Handle", "Mark", "Stat", "mark_of", "send", "stat_of", "stats")

# USER_HZ is 100 on every Linux that runs here (include/asm-generic/param.h).
_TICK_NS = 10_000_000
_MAX_STAT, _MAX_ENVIRON = 4096, 8 << 20
_MARK, _RANK, _WORKER = b"PROBING_GROUP=", b"RANK=", b"PROBING_WORKER="


class Stat(NamedTuple):
    """Values of /proc/PID/stat. ``parent``, ``session``: pids. ``start_ns``: ns since boot, in multiples of 10 ms."""

    pid: int
    parent: int
    session: int
    state: str
    start_ns: int
    threads: int

    @property
    def alive(self) -> bool:
        """Whether a thread of it can still run; its first thread may have ended before the others."""
        return self.state not in "ZX" or self.threads > 1


class Mark(NamedTuple):
    """What the environment of a process says: the group and generation that started it, its RANK and its worker."""

    group: str
    generation: int
    rank: int | None
    worker: str


class Clock:
    """The clocks of this machine. Stamps that outlive the launcher are ns since boot, with the id of the boot."""

    def __init__(self) -> None:
        self.boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def boot_ns(self) -> int:
        """ns since boot, the time of suspension included; nobody can set this clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def monotonic(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        """Unix time in ns, for people only: it may jump."""
        return time.time_ns()


class Handle:
    """A process, by a pidfd: never another process that got its pid later."""

    def __init__(self, pid: int, start_ns: int, fd: int) -> None:
        self.pid, self.start_ns, self._fd = pid, start_ns, fd

    @classmethod
    def open(cls, pid: int, start_ns: int) -> Handle | None:
        """Returns the handle of the process ``pid`` that started at ``start_ns``; None if it has ended and is reaped,
        or the pid belongs to another process.
        """
        try:
            fd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            return None
        # Read after the pidfd was opened: an equal start shows that the pidfd is of that process.
        stat = stat_of(pid)
        if stat is None or stat.start_ns != start_ns:
            os.close(fd)
            return None
        return cls(pid, start_ns, fd)

    def fileno(self) -> int:
        return self._fd

    def ended(self) -> bool:
        """Whether all threads of the process have ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, number: int) -> bool:
        """Sends a signal; returns whether the process was there and may be signalled."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def send(stat: Stat, *numbers: int) -> bool:
    """Sends signals to the process of ``stat``; returns whether it was there and may be signalled."""
    handle = Handle.open(stat.pid, stat.start_ns)
    if handle is None:
        return False
    try:
        return all(handle.send(number) for number in numbers)
    finally:
        handle.close()


def stat_of(pid: int) -> Stat | None:
    """Returns the values of /proc/PID/stat; None if there is no such process."""
    data = _read(f"/proc/{pid}/stat", _MAX_STAT)
    # The name of the program may have blanks and brackets.
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return Stat(
        pid, int(fields[1]), int(fields[3]), fields[0].decode("ascii"), int(fields[19]) * _TICK_NS, int(fields[17])
    )


def stats() -> dict[int, Stat]:
    """Returns the processes of this machine by pid."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit()]
    return {pid: stat for pid in pids if (stat := stat_of(pid)) is not None}


def mark_of(pid: int) -> Mark | None:
    """Returns what the environment of a process of this user says of its group; None if it says nothing."""
    data = _read(f"/proc/{pid}/environ", _MAX_ENVIRON, os.geteuid())
    if _MARK not in data:
        return None
    variables = data.split(b"\0")
    value = next((v[len(_MARK) :] for v in variables if v.startswith(_MARK)), b"").decode("utf-8", "replace")
    group, _, generation = value.rpartition("/")
    if not (group and generation.isascii() and generation.isdigit() and len(generation) <= 16):
        return None
    rank, worker = (next((v[len(name) :] for v in variables if v.startswith(name)), b"") for name in (_RANK, _WORKER))
    number = int(rank) if rank.isdigit() and len(rank) <= 9 else None
    return Mark(group, int(generation), number, worker.decode("utf-8", "replace"))


def _read(path: str, limit: int, owner: int | None = None) -> bytes:
    # A process may end, or turn out to be another user's, at any time.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if owner is not None and os.fstat(fd).st_uid != owner:
            return b""
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, 1 << 16))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)
