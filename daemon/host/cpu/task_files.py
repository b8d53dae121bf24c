"""Reads files of processes and threads in /proc again and again through descriptors that stay open.

A descriptor of a file of /proc belongs to one task for ever: when that has ended, a read fails with ESRCH, also where
another task got its number. A read through one takes 1 to 8 us, half of what it takes to open the file as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from probing.api.errors import PrivilegeError, ProcessGone, TargetError
from probing.daemon.host.cpu.task_stat import parse_stat_line

__all__ = ("TaskFiles",)

_BYTES = 16 << 10
# Files that nobody asked for in so many rounds are closed: their process has probably ended.
_IDLE_ROUNDS = 60
_Key = tuple[int, int, str]


@dataclass(slots=True)
class _File:
    """``start_ns``: start of the thread, in a file of a thread."""

    fd: int
    used: int
    start_ns: int = 0


class TaskFiles:
    """The open files of one reader, at most ``most``; beyond that a file is opened for each read."""

    def __init__(self, most: int, proc: str = "/proc") -> None:
        self._most, self._proc = most, proc
        self._files: dict[_Key, _File] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._files)

    def begin(self) -> None:
        """Begins a round of reads; files that are not in use any more are closed now and then."""
        self._round += 1
        full = len(self._files) >= self._most
        if full or self._round % _IDLE_ROUNDS == 0:
            oldest = self._round - (1 if full else _IDLE_ROUNDS)
            for key in [key for key, file in self._files.items() if file.used < oldest]:
                self._close(key)

    def close(self) -> None:
        for key in list(self._files):
            self._close(key)

    def stat(self, pid: int, start_ns: int) -> bytes:
        """Returns /proc/PID/stat of the process that began at ``start_ns``.

        Raises ProcessGone when it has ended, PrivilegeError or TargetError where the file cannot be read.
        """
        key = (pid, start_ns, "stat")
        if (file := self._files.get(key)) is not None:
            return self._again(key, file)
        fd = self._open(pid, "stat")
        try:
            data = _pread(pid, fd)
            seen = parse_stat_line(data)
            if seen is None or seen.start_ns != start_ns:
                raise ProcessGone(f"process {pid} exited, and its number belongs to another process")
        except BaseException:
            os.close(fd)
            raise
        self._keep(key, fd)
        return data

    def read(self, pid: int, start_ns: int, name: str) -> bytes:
        """Returns another file of that process, after ``stat``. Raises as that does."""
        key = (pid, start_ns, name)
        if (file := self._files.get(key)) is not None:
            return self._again(key, file)
        fd = self._open(pid, name)
        try:
            data = _pread(pid, fd)
            # It lives, so the file that was opened by its number is its own.
            self.stat(pid, start_ns)
        except BaseException:
            os.close(fd)
            raise
        self._keep(key, fd)
        return data

    def thread(self, pid: int, start_ns: int, tid: int) -> tuple[int, bytes]:
        """Returns the start of a thread (ns since boot) and its schedstat, after ``stat``. Raises as that does."""
        key = (pid, start_ns, f"task/{tid:d}/schedstat")
        if (file := self._files.get(key)) is not None:
            return file.start_ns, self._again(key, file)
        fd = self._open(pid, key[2])
        try:
            thread = parse_stat_line(self._once(pid, f"task/{tid:d}/stat"))
            self.stat(pid, start_ns)
            # Read last: the thread whose start was read has not ended by now.
            data = _pread(pid, fd)
            if thread is None:
                raise ProcessGone(f"thread {tid} of process {pid} exited")
        except BaseException:
            os.close(fd)
            raise
        self._keep(key, fd, thread.start_ns)
        return thread.start_ns, data

    def _again(self, key: _Key, file: _File) -> bytes:
        file.used = self._round
        try:
            return _pread(key[0], file.fd)
        except TargetError:
            self._close(key)
            raise

    def _once(self, pid: int, name: str) -> bytes:
        fd = self._open(pid, name)
        try:
            return _pread(pid, fd)
        finally:
            os.close(fd)

    def _open(self, pid: int, name: str) -> int:
        try:
            return os.open(f"{self._proc}/{pid:d}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise _error(pid, e) from e

    def _keep(self, key: _Key, fd: int, start_ns: int = 0) -> None:
        if len(self._files) >= self._most or key in self._files:
            os.close(fd)
        else:
            self._files[key] = _File(fd, self._round, start_ns)

    def _close(self, key: _Key) -> None:
        os.close(self._files.pop(key).fd)


def _pread(pid: int, fd: int) -> bytes:
    try:
        return os.pread(fd, _BYTES, 0)
    except OSError as e:
        raise _error(pid, e) from e


def _error(pid: int, e: OSError) -> TargetError | PrivilegeError:
    if isinstance(e, (FileNotFoundError, ProcessLookupError)):
        return ProcessGone(f"process {pid} exited")
    if isinstance(e, PermissionError):
        return PrivilegeError(f"process {pid} may not be read", hint="reading a process takes CAP_SYS_PTRACE")
    return TargetError(f"process {pid} cannot be read: {e.strerror}")
