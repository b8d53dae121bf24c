"""Reads files of processes and threads in /proc repeatedly, through descriptors that stay open.

A descriptor of a file in /proc stays bound to its task: once the task has ended, a read fails with ESRCH, even if
another task has got its number. A read through an open descriptor takes 1 to 8 us, half as long as an open and a read.

The functions ``parse_*`` turn the bytes of these files into numbers. Formats: proc(5),
Documentation/scheduler/sched-stats.rst. A task chooses its name in the stat file, which may contain blanks, brackets
and line ends; the kernel writes the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from probing.api.errors import PrivilegeError, ProcessGone, TargetError
from probing.daemon.processes.procfs import TICK_NS, clean_text

__all__ = (
    "ABSENT",
    "StatLine",
    "TaskFiles",
    "name_of",
    "parse_run_times",
    "parse_stat_line",
    "parse_status_lines",
)

ABSENT = -1
"""Stands for a number that the kernel does not report."""
_MOST = (1 << 63) - 1
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Indices of fields after the name in a stat file, counted from 0.
_FLAGS, _MAJOR_FAULTS, _USER, _SYSTEM, _THREADS, _START, _RSS, _PROCESSOR = 6, 9, 11, 12, 17, 19, 21, 36


class StatLine(NamedTuple):
    """The values of a stat file. ``state`` is the kernel's letter; times are multiples of a tick of 10 ms.
    ``start_ns``: since boot.
    """

    comm: bytes
    state: int
    flags: int
    user_ns: int
    sys_ns: int
    major_faults: int
    processor: int
    threads: int
    rss_bytes: int
    start_ns: int


class _StatusLines(NamedTuple):
    """Context switches of a task, and the list of CPUs on which the task may run, as the kernel writes the list."""

    voluntary: int
    involuntary: int
    cpus: bytes


def parse_stat_line(data: bytes) -> StatLine | None:
    """Returns the values of a stat file of a process or thread; None if it is cut short or contains no numbers."""
    head, _, rest = data.rpartition(b")")
    fields = rest.split(None, _PROCESSOR + 1)
    if len(fields) <= _PROCESSOR or len(rest) > 1_024:
        return None
    try:
        return StatLine(
            head[head.find(b"(") + 1 :][:64],
            fields[0][0],
            int(fields[_FLAGS]),
            _ns(fields[_USER]),
            _ns(fields[_SYSTEM]),
            min(int(fields[_MAJOR_FAULTS]), _MOST),
            int(fields[_PROCESSOR]),
            int(fields[_THREADS]),
            min(int(fields[_RSS]) * _PAGE, _MOST),
            _ns(fields[_START]),
        )
    except ValueError:
        return None


def parse_status_lines(data: bytes) -> _StatusLines:
    """Returns the values of a status file; ABSENT, or no CPUs, for a missing line."""
    # These lines are at the end of the file, after the name of the task, which could imitate them.
    at = data.rfind(b"\nCpus_allowed_list:\t")
    cpus = data[at + 20 : data.find(b"\n", at + 20)][:1_024] if at >= 0 else b""
    voluntary, involuntary = (
        _after(data, b"\nvoluntary_ctxt_switches:\t"),
        _after(data, b"\nnonvoluntary_ctxt_switches:\t"),
    )
    return _StatusLines(voluntary, involuntary, cpus)


def parse_run_times(data: bytes) -> tuple[int, int]:
    """Returns the time on a CPU and the time runnable without a CPU, ns, from a schedstat file; ABSENT if they are
    missing.
    """
    words = data[:64].split()
    if len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
        return ABSENT, ABSENT
    return min(int(words[0]), _MOST), min(int(words[1]), _MOST)


@lru_cache(maxsize=4_096)
def name_of(raw: bytes) -> str:
    """Returns a name, or another short text of the kernel, without control characters."""
    return clean_text(raw, 128)


def _ns(ticks: bytes) -> int:
    return min(int(ticks) * TICK_NS, _MOST)


def _after(data: bytes, name: bytes) -> int:
    at = data.rfind(name)
    if at < 0:
        return ABSENT
    word = data[at + len(name) : at + len(name) + 20].partition(b"\n")[0]
    return int(word) if word.isdigit() else ABSENT


_BYTES = 16 << 10
# A file is closed after this many rounds without a request for it: its process has probably ended.
_IDLE_ROUNDS = 60
_Key = tuple[int, int, str]


@dataclass(slots=True)
class _File:
    """An open file. ``used``: the last round that read it; ``start_ns``: for a file of a thread, the thread's start."""

    fd: int
    used: int
    start_ns: int = 0


class TaskFiles:
    """The open files of a reader, at most ``most``; all further files are opened for each read."""

    def __init__(self, most: int, proc: str = "/proc") -> None:
        self._most, self._proc = most, proc
        self._files: dict[_Key, _File] = {}
        self._round = 0

    def __len__(self) -> int:
        return len(self._files)

    def begin(self) -> None:
        """Begins a round of reads. Some rounds close files that are no longer in use."""
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

        Raises ProcessGone if the process has ended, PrivilegeError or TargetError if the file cannot be read.
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
        """Returns the file ``name`` of the process. Call ``stat`` before it. Raises the errors of ``stat``."""
        key = (pid, start_ns, name)
        if (file := self._files.get(key)) is not None:
            return self._again(key, file)
        fd = self._open(pid, name)
        try:
            data = _pread(pid, fd)
            # ``stat`` shows that the process still runs, so its pid was not reused and the file that was opened by pid
            # belongs to it.
            self.stat(pid, start_ns)
        except BaseException:
            os.close(fd)
            raise
        self._keep(key, fd)
        return data

    def thread(self, pid: int, start_ns: int, tid: int) -> tuple[int, bytes]:
        """Returns the start of a thread (ns since boot) and its schedstat. Call ``stat`` before it. Raises the errors
        of ``stat``.
        """
        key = (pid, start_ns, f"task/{tid:d}/schedstat")
        if (file := self._files.get(key)) is not None:
            return file.start_ns, self._again(key, file)
        fd = self._open(pid, key[2])
        try:
            thread = parse_stat_line(self._once(pid, f"task/{tid:d}/stat"))
            self.stat(pid, start_ns)
            # This read comes last: if it succeeds, the thread whose start was read has not ended.
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
        return PrivilegeError(f"no permission to read process {pid}", hint="reading a process takes CAP_SYS_PTRACE")
    return TargetError(f"process {pid} cannot be read: {e.strerror}")
