"""Names of the system calls in which a thread can wait, and where each has the file that it is about.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64) in Linux 6.18.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

__all__ = ("SystemCall", "system_call")

# Name, number on x86-64, number on arm64, and what its arguments name; a dash where there is none.
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


class SystemCall(NamedTuple):
    """``about``: fd (argument 0 is a descriptor), path0 and path1 (that argument points to a path), poll, select,
    child0 and child1 (that argument is a pid), or empty."""

    name: str
    about: str


def system_call(number: int, machine: str = platform.machine()) -> SystemCall | None:
    """Returns the call with this number on ``machine``; None when it is not in the table."""
    return _BY_NUMBER.get(machine, {}).get(number)


def _by_number(column: int) -> dict[int, SystemCall]:
    words = iter(_TABLE.split())
    rows = zip(words, words, words, words, strict=True)
    return {int(row[column]): SystemCall(row[0], row[3].strip("-")) for row in rows if row[column] != "-"}


_BY_NUMBER = {machine: _by_number(column) for machine, column in _COLUMN.items()}
