"""Reads what a thread of another process waits for: its system call, and the file, pipe, socket or child of that call.

No file of the target is opened: links of /proc/PID/fd are read as text. Attributes of a file are read only if its file
system is on this machine, since a dead server would block the reader.

``_TABLE`` lists the system calls in which a thread can wait and, for each call, which argument names its file or child.
Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64) in Linux 6.18.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import stat
import struct
from contextlib import suppress
from typing import NamedTuple, TypedDict

from probing.api.errors import ProbingError
from probing.daemon.processes.conditions.counters import parse_task_stat
from probing.daemon.processes.conditions.mounts import Mount, handle_of, mount_of, plain_path, waits_for_others
from probing.daemon.processes.conditions.sockets import SocketTables
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = (
    "ThreadWait",
    "WaitReader",
    "lock_holder",
    "system_call",
)

# Columns: name, number on x86-64, number on arm64, ``about`` of _SystemCall; a dash for a missing value.
_TABLE = """
read 0 63 fd              write 1 64 fd             open 2 - path0            close 3 57 fd
stat 4 - path0            fstat 5 80 fd             lstat 6 - path0           poll 7 - poll
mmap 9 222 -              ioctl 16 29 fd            pread64 17 67 fd          pwrite64 18 68 fd
readv 19 65 fd            writev 20 66 fd           access 21 - path0         select 23 - select
sched_yield 24 124 -      msync 26 227 -            pause 34 - -              nanosleep 35 101 -
sendfile 40 71 fd         connect 42 203 fd         accept 43 202 fd          sendto 44 206 fd
recvfrom 45 207 fd        sendmsg 46 211 fd         recvmsg 47 212 fd         wait4 61 260 child0
semop 65 193 -            msgrcv 70 188 -           fcntl 72 25 fd            flock 73 32 fd
fsync 74 82 fd            fdatasync 75 83 fd        ftruncate 77 46 fd        getdents 78 - fd
rename 82 - path0         mkdir 83 - path0          rmdir 84 - path0          creat 85 - path0
unlink 87 - path0         rt_sigtimedwait 128 137 - rt_sigsuspend 130 133 -   statfs 137 43 path0
fstatfs 138 44 fd         sync 162 81 -             futex 202 98 -            io_getevents 208 4 -
getdents64 217 61 fd      semtimedop 220 192 -      clock_nanosleep 230 115 - exit_group 231 94 -
epoll_wait 232 - fd       waitid 247 95 child1      openat 257 56 path1       mkdirat 258 34 path1
newfstatat 262 79 path1   unlinkat 263 35 path1     renameat 264 38 path1     faccessat 269 48 path1
pselect6 270 72 select    ppoll 271 73 poll         splice 275 76 fd          sync_file_range 277 84 fd
epoll_pwait 281 22 fd     fallocate 285 47 fd       accept4 288 242 fd        preadv 295 69 fd
pwritev 296 70 fd         recvmmsg 299 243 fd       syncfs 306 267 fd         sendmmsg 307 269 fd
renameat2 316 276 path1   copy_file_range 326 285 fd preadv2 327 286 fd       pwritev2 328 287 fd
statx 332 291 path1       io_uring_enter 426 426 fd openat2 437 437 path1     faccessat2 439 439 path1
epoll_pwait2 441 441 fd   futex_waitv 449 449 -     futex_wait 455 455 -      kill 62 129 -
tgkill 234 131 -          clone 56 220 -            vfork 58 - -              clone3 435 435 -
execve 59 221 -           munmap 11 215 -           madvise 28 233 -          process_vm_readv 310 270 -
"""
_COLUMN = {"x86_64": 1, "aarch64": 2}


class _SystemCall(NamedTuple):
    """A system call. ``about``: fd (argument 0 is a descriptor), path0 or path1 (argument 0 or 1 points to a path),
    poll, select, child0 or child1 (argument 0 or 1 is a pid), or empty."""

    name: str
    about: str


def system_call(number: int, machine: str = platform.machine()) -> _SystemCall | None:
    """Returns the call with this number on ``machine``; None when it is not in the table."""
    return _BY_NUMBER.get(machine, {}).get(number)


def _by_number(column: int) -> dict[int, _SystemCall]:
    words = iter(_TABLE.split())
    rows = zip(words, words, words, words, strict=True)
    return {int(row[column]): _SystemCall(row[0], row[3].strip("-")) for row in rows if row[column] != "-"}


_BY_NUMBER = {machine: _by_number(column) for machine, column in _COLUMN.items()}


MAX_PATH = 512
MAX_POLLED = 64
_FD_SET_BYTES = 128
_KINDS = {
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "directory",
    stat.S_IFBLK: "device",
    stat.S_IFREG: "file",
}
_LOCKS = frozenset(("flock", "fcntl"))
# "7: -> FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF" means that process 4711 waits for lock 7 (proc(5), /proc/locks).
# If several processes wait for a lock, each line is indented more than the line before (fs/locks.c, lock_get_status).
_LOCK = re.compile(rb"^(\d{1,10}): +(->)? ?\S+ +\S+ +\S+ (-?\d{1,10}) ", re.MULTILINE)
_MAX_LOCKS = 1 << 20
_EPOLL = "anon_inode:[eventpoll]"
# The descriptors that an epoll instance watches: proc(5), /proc/pid/fdinfo.
_WATCHED = re.compile(rb"^tfd:\s*(\d{1,10}) ", re.MULTILINE)
_MOUNT_NUMBER = re.compile(rb"^mnt_id:\s*(\d{1,10})$", re.MULTILINE)


class ThreadWait(TypedDict):
    """The wait of a thread. ``target``: the file, socket or child that the thread waits for. ``fd``: the descriptor.
    ``target_kind``: file, fifo, pipe, socket, listener (a socket that listens), tty, directory, device, child or other.
    ``lock_holder``: the pid of the process that holds the file lock for which the thread waits.

    If a call such as poll waits for several files, ``target`` is the first socket that listens, or else the first file;
    ``more`` is the number of further files.
    """

    wchan: str | None
    syscall: str | None
    fd: int | None
    target: str | None
    target_kind: str | None
    file_system: str | None
    lock_holder: int | None
    more: int


class _Place(TypedDict):
    target: str | None
    target_kind: str | None
    file_system: str | None


_NOWHERE: _Place = {"target": None, "target_kind": None, "file_system": None}


class WaitReader:
    """Reads what the threads of one process wait for. ``mounts``: the mounts that the process sees."""

    def __init__(self, target: Target, memory: Memory, mounts: list[Mount]) -> None:
        self._target = target
        self._memory = memory
        self._mounts = mounts
        self._sockets = SocketTables(target)

    def read(self, tid: int) -> ThreadWait:
        """Returns what thread ``tid`` waits for. A value is None if the thread runs or the kernel does not show the
        value. Raises ProcessGone."""
        words = _text(self._target, f"task/{tid}/syscall").split()
        number = _integer(words[0]) if words else None
        call = system_call(number) if number is not None else None
        arguments = [_integer(word) or 0 for word in words[1:7]]
        fds: list[int] = []
        place, holder = _NOWHERE, None
        if call is not None and len(arguments) == 6:
            fds = self._awaited(call, arguments)
            place = self._descriptor(fds[0]) if fds else self._named(call, arguments)
            if call.name in _LOCKS and place["target"] is not None:
                holder = _holder({tid, self._target.pid})
                held = f", held by {_process(holder)}" if holder is not None else ""
                place = {**place, "target": place["target"] + held}
        wchan = clean_text(_text(self._target, f"task/{tid}/wchan"), 64)
        return {
            "wchan": wchan if wchan not in ("", "0") else None,
            "syscall": call.name if call else f"call {number}" if number is not None and number >= 0 else None,
            "fd": fds[0] if fds else None,
            **place,
            "lock_holder": holder,
            "more": max(0, len(fds) - 1),
        }

    def _awaited(self, call: _SystemCall, arguments: list[int]) -> list[int]:
        """Returns the descriptors on which ``call`` waits; the first listening socket is moved to the front."""
        fds = _descriptors(call, arguments, self._memory)
        if call.name.startswith("epoll_") and fds and self._link(fds[0]) == _EPOLL:
            fds += [int(fd) for fd in _WATCHED.findall(_text(self._target, f"fdinfo/{fds[0]}", MAX_POLLED * 80))]
            fds = fds[: MAX_POLLED + 1]
        listener = next((fd for fd in fds if self._listens(fd)), None) if len(fds) > 1 else None
        return fds if listener is None else [listener, *(fd for fd in fds if fd != listener)]

    def _link(self, fd: int) -> str:
        try:
            return clean_text(self._target.link(f"fd/{fd}"), MAX_PATH)
        except ProbingError:
            return ""

    def _listens(self, fd: int) -> bool:
        link = self._link(fd)
        return link.startswith("socket:") and self._sockets.described(link).listens

    def _descriptor(self, fd: int) -> _Place:
        try:
            link = self._target.link(f"fd/{fd}")
        except ProbingError:
            return _NOWHERE
        shown = clean_text(link, MAX_PATH)
        if not link.startswith(b"/"):
            kind = shown.partition(":")[0]
            if kind == "socket":
                shown, listens = self._sockets.described(shown)
                kind = "listener" if listens else kind
            kind = kind if kind in ("pipe", "socket", "listener") else "other"
            return {"target": shown, "target_kind": kind, "file_system": None}
        match = _MOUNT_NUMBER.search(_text(self._target, f"fdinfo/{fd}"))
        mount = mount_of(self._mounts, number=int(match[1])) if match else mount_of(self._mounts, path=link)
        found: _Place = {"target": shown, "target_kind": None, "file_system": mount.text() if mount else None}
        if not waits_for_others(mount):
            with suppress(OSError):
                found["target_kind"] = _kind(os.stat(f"fd/{fd}", dir_fd=self._target.dir_fd))
        return found

    def _named(self, call: _SystemCall, arguments: list[int]) -> _Place:
        """Returns the target of a call whose argument is a path or a pid."""
        if call.about.startswith("path"):
            at = arguments[int(call.about[4:])]
            path = _memory(self._memory, at, MAX_PATH, text=True).partition(b"\0")[0]
            return self._path(path) if path else _NOWHERE
        if call.about.startswith("child"):
            return _child(arguments[int(call.about[5:])])
        return _NOWHERE

    def _path(self, path: bytes) -> _Place:
        found: _Place = {**_NOWHERE, "target": clean_text(path, MAX_PATH)}
        plain = plain_path(path)
        mount = mount_of(self._mounts, path=plain) if plain is not None else None
        if plain is None or mount is None:
            return found
        kind = None
        if not waits_for_others(mount):
            try:
                with handle_of(self._target, plain) as handle:
                    kind = _kind(os.fstat(handle))
            except OSError as e:
                if e.errno == errno.ELOOP:
                    # The link in the path may lead to any file system, so the file is not examined.
                    return found
        return {**found, "target_kind": kind, "file_system": mount.text()}


def _descriptors(call: _SystemCall, arguments: list[int], memory: Memory) -> list[int]:
    """Returns the descriptors in the arguments of ``call``: one descriptor, or the set that poll or select watches."""
    if call.about == "fd":
        # The kernel reads an int: the upper half of the register has no meaning.
        fd = arguments[0] & 0xFFFF_FFFF
        return [fd] if fd < 1 << 31 else []
    if call.about == "poll":
        data = _memory(memory, arguments[0], 8 * min(arguments[1], MAX_POLLED))
        fds = [fd for fd, _, _ in struct.iter_unpack("=ihh", data)]
        return [fd for fd in fds if fd >= 0]
    if call.about == "select":
        size = min((arguments[0] + 63) // 64 * 8, _FD_SET_BYTES)
        bits = int.from_bytes(_memory(memory, arguments[1], size), "little")
        return [fd for fd in range(min(arguments[0], 8 * size)) if bits >> fd & 1]
    return []


def _child(pid: int) -> _Place:
    pid &= 0xFFFF_FFFF
    if not 0 < pid < 1 << 31:
        return {**_NOWHERE, "target": "any child", "target_kind": "child"}
    return {**_NOWHERE, "target": _process(pid), "target_kind": "child"}


def _process(pid: int) -> str:
    """Returns a text such as "rsync (pid 9, state S)"."""
    try:
        with Target(pid) as process:
            found = parse_task_stat(process.read("stat", 4_096))
    except ProbingError:
        found = None
    return f"{found.name} (pid {pid}, state {found.state})" if found else f"pid {pid}"


def _holder(waiters: set[int]) -> int | None:
    try:
        with open("/proc/locks", "rb") as file:
            return lock_holder(file.read(_MAX_LOCKS), waiters)
    except OSError:
        return None


def lock_holder(table: bytes, waiters: set[int]) -> int | None:
    """Returns the pid of the process that holds the lock for which a pid in ``waiters`` waits; None if unknown.

    ``table``: the text of /proc/locks.
    """
    holders: dict[bytes, int] = {}
    for number, waits, text in _LOCK.findall(table):
        if not waits:
            holders[number] = int(text)
        elif int(text) in waiters:
            holder = holders.get(number, -1)
            return holder if holder > 0 else None
    return None


def _kind(found: os.stat_result) -> str:
    if stat.S_ISCHR(found.st_mode):
        # Major numbers of terminals: Documentation/admin-guide/devices.txt.
        return "tty" if os.major(found.st_rdev) in (4, 5, *range(136, 144)) else "device"
    return _KINDS.get(stat.S_IFMT(found.st_mode), "other")


def _memory(memory: Memory, at: int, size: int, *, text: bool = False) -> bytes:
    if not at or size <= 0:
        return b""
    # A text may end shortly before memory that cannot be read. Then the first read fails, and the second range counts:
    # it ends with the page of ``at``.
    ranges = [(at, size), (at, min(size, 4_096 - at % 4_096))] if text else [(at, size)]
    return next((data for data in memory.read_many(ranges) if data), b"")


def _text(target: Target, name: str, limit: int = 4_096) -> bytes:
    try:
        return target.read(name, limit)
    except ProbingError:
        return b""


def _integer(word: bytes) -> int | None:
    try:
        return int(word, 0) if len(word) <= 20 else None
    except ValueError:
        return None
