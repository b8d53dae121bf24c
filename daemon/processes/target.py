"""Reads one process from /proc. Only readers use this module, because each read of a target can block forever.

All reads go through a descriptor of ``/proc/PID``, which stays bound to that process: a reused pid cannot return
another process's data. The process must be the same before and after each request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from probing.api.errors import PrivilegeError, ProbingError, ProcessGone, TargetError
from probing.daemon.ipc import Header
from probing.daemon.processes.environment import ALLOWED_NAMES, read_environ
from probing.daemon.processes.liveness import running_thread
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.owners import owner_of
from probing.daemon.processes.procfs import (
    Stat,
    clean_text,
    parse_cgroup,
    parse_cmdline,
    parse_environ,
    parse_memory,
    parse_stat,
    parse_status,
)

__all__ = ("Summary", "Target", "identity", "list_processes", "states")

MAX_ENVIRON = 4 << 20
MAX_CMDLINE = 16 << 10
MAX_MAPS = 16 << 20
MAX_COMMAND = 4_096
MAX_ARGUMENT = 1_024
MAX_PIDS = 65_536
MAX_THREADS = 1_024
MAX_ANCESTORS = 32
MAX_TARGETS = 4_096
# The maximum number of reads, and of bytes read, for an environment. MAX_VARIABLES variables take about 130 reads.
MAX_READS, MAX_READ_BYTES = 1_024, 8 << 20
_CHUNK = 64 << 10
_LIBRARY = re.compile(
    rb"/(?:(libpython[0-9][^/\n]*\.so[^/\n]*|python3?(?:\.[0-9]+)?[a-z]*)"
    rb"|(libtorch[^/\n]*\.so[^/\n]*)|(libnccl[^/\n]*\.so[^/\n]*)|(jaxlib/[^\n]*\.so[^/\n]*))(?: \(deleted\))?\n"
)
_LIBRARY_KINDS = ("python", "torch", "nccl", "jax")


class Target:
    """A process to read. ``start_ns`` 0: any process that has the pid now. Raises ProcessGone.

    If the main thread has ended before other threads, ``dir_fd`` and the state in ``stat`` belong to another thread:
    the kernel shows no memory and no files of a thread that has ended.
    """

    def __init__(self, pid: int, start_ns: int = 0) -> None:
        self.pid = pid
        with self._errors():
            self.dir_fd = self._main_fd = _open_directory(f"/proc/{pid:d}")
        try:
            self.stat = self._main_stat()
            if start_ns not in (0, self.stat.start_ns):
                raise ProcessGone(f"process {pid} exited, and its number belongs to another process")
            if _main_thread_ended(self.stat) and (tid := running_thread(pid)):
                with self._errors():
                    self.dir_fd = _open_directory(f"/proc/{tid:d}")
                self.stat = self.stat._replace(state=parse_stat(self.read("stat", 4096)).state)
        except BaseException:
            self.close()
            raise

    @property
    def start_ns(self) -> int:
        return self.stat.start_ns

    def close(self) -> None:
        for fd in {self.dir_fd, self._main_fd}:
            os.close(fd)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raises ProcessGone if the process has ended."""
        stat = self._main_stat()
        if stat.state in "ZX" and not _main_thread_ended(stat):
            raise ProcessGone(f"process {self.pid} exited while it was read")

    def read(self, name: str, limit: int) -> bytes:
        """Returns at most ``limit`` bytes of ``/proc/PID/name``. Raises ProcessGone, PrivilegeError or TargetError."""
        fd = self.open(name)
        try:
            with self._errors():
                return _read_all(fd, limit)
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """Returns a read-only descriptor of ``/proc/PID/name``. Raises the errors of ``read``."""
        with self._errors():
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.dir_fd)

    def directory(self, name: str) -> int:
        """Returns an O_PATH descriptor of the directory that ``/proc/PID/name`` is or leads to. Raises the errors of
        ``read``. ProcessGone can mean that the process is exiting: it loses its root before its pid."""
        with self._errors():
            return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.dir_fd)

    def link(self, name: str) -> bytes:
        with self._errors():
            return os.readlink(name.encode(), dir_fd=self.dir_fd)

    def owner(self, uid: int, cgroup: list[str]) -> int:
        """Returns ``owners.owner_of`` of the process. Raises the errors of ``read``."""
        with self._errors():
            return owner_of(lambda name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.dir_fd), uid, cgroup)

    def thread_names(self) -> list[str]:
        """Returns the distinct names of the process's threads, sorted."""
        names = set()
        with self._errors():
            threads = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.dir_fd)
            try:
                for tid in os.listdir(threads)[:MAX_THREADS]:  # noqa: PTH208
                    names.add(_thread_name(threads, tid))
            finally:
                os.close(threads)
        return sorted(names - {""})

    def _main_stat(self) -> Stat:
        with self._errors():
            fd = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._main_fd)
            try:
                return parse_stat(_read_all(fd, 4096))
            finally:
                os.close(fd)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, ProcessLookupError) as e:
            raise ProcessGone(f"process {self.pid} exited") from e
        except PermissionError as e:
            raise PrivilegeError(
                f"no permission to read process {self.pid}",
                hint="reading a process needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            ) from e
        except OSError as e:
            raise TargetError(f"process {self.pid} cannot be read: {e.strerror}") from e


def identity(target: Target) -> Header:
    """Returns the facts for ``facts.Facts.from_reader``, with clean texts and only ALLOWED_NAMES of the environment.

    ``environ``: the variables at exec, unless the process has written its title over them; ``variables``: the variables
    that getenv(3) would return now, or None.
    """
    status = parse_status(target.read("status", _CHUNK))
    arguments, cut = [], MAX_COMMAND
    for argument in parse_cmdline(target.read("cmdline", MAX_CMDLINE)):
        text = clean_text(argument, max(2, min(MAX_ARGUMENT, cut)))
        arguments.append(text)
        cut -= len(text) + 1
        if cut <= 0:
            break
    maps, program = target.read("maps", MAX_MAPS), target.link("exe")
    cgroup = [clean_text(path, MAX_ARGUMENT) for path in parse_cgroup(target.read("cgroup", _CHUNK))]
    uid = status["Uid"][0]
    return {
        "pid": target.pid,
        "start_ns": target.start_ns,
        "ppid": target.stat.ppid,
        "state": target.stat.state,
        "comm": clean_text(target.stat.comm, 64),
        "uid": uid,
        "owner": target.owner(uid, cgroup),
        "exe": clean_text(program, MAX_ARGUMENT),
        "cmdline": arguments,
        "environ": parse_environ(target.read("environ", MAX_ENVIRON), ALLOWED_NAMES),
        "variables": _variables(target.pid, maps, program),
        "cgroup": cgroup,
        "ancestors": _ancestors(target.stat.ppid),
        "libraries": _libraries(maps),
        "threads": target.thread_names()[:64],
    }


def states(wanted: list[Any], threads: bool, memory: bool = False) -> list[Header | None]:
    """Returns state, parent, thread names and memory of each process [pid, start_ns]; None for a process that has ended
    or cannot be read. Raises PrivilegeError.
    """
    found: list[Header | None] = []
    for pid, start_ns in wanted[:MAX_TARGETS]:
        try:
            with Target(int(pid), int(start_ns)) as target:
                names = target.thread_names()[:64] if threads else []
                used = parse_memory(target.read("status", _CHUNK) if memory else b"")
                state = {"state": target.stat.state, "ppid": target.stat.ppid, "threads": names}
                found.append({**state, **used})
        except TargetError:
            found.append(None)
    return found


class Summary(NamedTuple):
    """An entry of a list of processes; ``state`` is the kernel's letter."""

    pid: int
    start_ns: int
    ppid: int
    state: str
    comm: str
    exe: str


def list_processes(pids: list[int] | None) -> list[Summary]:
    """Returns the processes with these ``pids`` (None: all), without kernel threads."""
    if pids is None:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for pid in pids[:MAX_PIDS]:
        try:
            with Target(int(pid)) as target:
                if not target.stat.kernel_thread:
                    found.append(_summary(target))
        except TargetError:
            continue  # the process ended between the listing and the read
    return found


def _summary(target: Target) -> Summary:
    seen = target.stat
    try:
        exe = clean_text(target.link("exe"), MAX_ARGUMENT)
    except (ProcessGone, PrivilegeError):
        exe = ""
    return Summary(seen.pid, seen.start_ns, seen.ppid, seen.state, clean_text(seen.comm, 64), exe)


def _ancestors(pid: int) -> list[list[Any]]:
    """Returns [pid, start_ns, name of the program] of ``pid`` and its ancestors, without process 1."""
    found: list[list[Any]] = []
    while pid > 1 and len(found) < MAX_ANCESTORS:
        try:
            with Target(pid) as target:
                seen = _summary(target)
        except TargetError:
            break
        found.append([pid, seen.start_ns, seen.exe.removesuffix(" (deleted)").rpartition("/")[2]])
        pid = seen.ppid
    return found


def _variables(pid: int, maps: bytes, program: bytes) -> dict[str, str] | None:
    memory = ProcessMemory(pid, max_calls=MAX_READS, max_bytes=MAX_READ_BYTES)
    try:
        return read_environ(memory, maps, program, ALLOWED_NAMES)
    except ProcessGone:
        raise
    except ProbingError:
        return None  # the other facts are still useful


def _main_thread_ended(stat: Stat) -> bool:
    """Returns whether the main thread has ended and other threads have not."""
    return stat.state == "Z" and stat.threads > 1


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _libraries(maps: bytes) -> list[str]:
    kinds = {_LIBRARY_KINDS[(match.lastindex or 1) - 1] for match in _LIBRARY.finditer(maps)}
    return sorted(kinds)


def _read_all(fd: int, limit: int) -> bytes:
    parts = []
    while limit > 0:
        part = os.read(fd, min(limit, _CHUNK))
        if not part:
            break
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _thread_name(threads: int, tid: str) -> str:
    try:
        fd = os.open(f"{tid}/comm", os.O_RDONLY | os.O_CLOEXEC, dir_fd=threads)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    try:
        return clean_text(os.read(fd, 64).rstrip(b"\n"), 32)
    except ProcessLookupError:
        return ""
    finally:
        os.close(fd)
