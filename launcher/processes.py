"""Processes of this machine as /proc shows them, and signals that reach only the intended process."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ("Clock", "Handle", "Mark", "Stat", "mark_in", "mark_of", "send", "stat_of", "stats", "still_alive")

# USER_HZ is 100 on every Linux that runs here (include/asm-generic/param.h).
_TICK_NS = 10_000_000
_MAX_STAT, _MAX_ENVIRON, _MAX_VALUE = 4096, 8 << 20, 256
_GROUP, _RANK, _WORKER = b"PROBING_GROUP", b"RANK", b"PROBING_WORKER"
_NUMBER = re.compile(r"[0-9]{1,16}")


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
        """Whether a thread of the process can still run; the first thread may have ended before other threads."""
        return self.state not in "ZX" or self.threads > 1


class Mark(NamedTuple):
    """What the environment of a process says: the group and generation that started it, its RANK, and its worker.
    ``worker`` is empty if its variable is missing.
    """

    group: str
    generation: int
    rank: int | None
    worker: str


class Clock:
    """The clocks of this machine. Timestamps that outlive the launcher are ns since boot, with the id of the boot."""

    def __init__(self) -> None:
        self.boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def boot_ns(self) -> int:
        """Returns ns since boot, including the time of suspension. Nobody can set this clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def unix_ns(self) -> int:
        """Returns Unix time in ns. Only for display, because this clock may jump."""
        return time.time_ns()


class Handle:
    """A process, held by a pidfd. It never refers to another process that got the same pid later."""

    def __init__(self, pid: int, start_ns: int, fd: int) -> None:
        self.pid, self.start_ns, self._fd = pid, start_ns, fd

    @classmethod
    def open(cls, pid: int, start_ns: int) -> Handle | None:
        """Returns the handle of the process ``pid`` that started at ``start_ns``; None if it has ended and is reaped,
        or the pid belongs to another process. Raises OSError if there are not enough descriptors or memory.
        """
        try:
            fd = os.pidfd_open(pid)
        except (ProcessLookupError, OverflowError):
            return None
        except OSError as e:
            if e.errno == errno.EINVAL:  # The id of a thread, or not a pid.
                return None
            raise
        # Read after the pidfd was opened, so an equal start shows that the pidfd refers to the process.
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
        """Sends a signal; returns whether the process existed and this user may signal it."""
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
    """Sends signals to the process of ``stat``; returns whether it existed and this user may signal it."""
    try:
        handle = Handle.open(stat.pid, stat.start_ns)
    except OSError:
        return False
    if handle is None:
        return False
    try:
        return all(handle.send(number) for number in numbers)
    finally:
        handle.close()


def stat_of(pid: int) -> Stat | None:
    """Returns the values of /proc/PID/stat; None if there is no such process. Raises OSError if it cannot be read."""
    data = _read(f"/proc/{pid}/stat", _MAX_STAT)
    # The name of the program may have blanks and brackets.
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return Stat(
        pid, int(fields[1]), int(fields[3]), fields[0].decode("ascii"), int(fields[19]) * _TICK_NS, int(fields[17])
    )


def still_alive(stat: Stat) -> bool:
    """Returns whether the process of ``stat`` still runs; True if that is unknown."""
    try:
        now = stat_of(stat.pid)
    except OSError:
        return True
    return now is not None and now.start_ns == stat.start_ns and now.alive


def stats() -> dict[int, Stat]:
    """Returns the processes of this machine by pid. Raises OSError if a process cannot be read."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit()]
    return {pid: stat for pid in pids if (stat := stat_of(pid)) is not None}


def mark_of(pid: int) -> Mark | None:
    """Returns what the environment of a process of this user says of its group; None if it names no group.

    Raises OSError if the environment cannot be read for lack of descriptors or memory.
    """
    data = _read(f"/proc/{pid}/environ", _MAX_ENVIRON, os.geteuid())
    return mark_in(data) if _GROUP in data else None


def mark_in(environ: bytes) -> Mark | None:
    """Returns what an environment, as in /proc/PID/environ, says of its group; None if it names no group."""
    found: dict[bytes, str] = {}
    for variable in environ.split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name in (_GROUP, _RANK, _WORKER):
            found.setdefault(name, value[:_MAX_VALUE].decode("utf-8", "replace"))
    group, _, generation = found.get(_GROUP, "").rpartition("/")
    if not group or not _NUMBER.fullmatch(generation):
        return None
    rank = found.get(_RANK, "")
    return Mark(group, int(generation), int(rank) if _NUMBER.fullmatch(rank) else None, found.get(_WORKER, ""))


def _read(path: str, limit: int, owner: int | None = None) -> bytes:
    """Returns the content of a file of /proc; empty if the process has ended, or is not a process of ``owner``.

    Raises OSError for other reasons: a process that cannot be read must not look like one that has ended.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    try:
        if owner is not None and os.fstat(fd).st_uid != owner:
            return b""
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, 1 << 16))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except (ProcessLookupError, PermissionError):
        return b""
    finally:
        os.close(fd)
