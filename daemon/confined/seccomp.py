"""Refuses system calls to a process permanently, by a seccomp filter (Linux 3.17).

The filter forbids actions that Landlock allows: sockets, access to other processes, files opened for writing, changes
of modes and owners, memory that limits do not count. READER, INJECTOR, SERVICE and COLLECTOR are the calls that these
processes keep. Calls that a kernel or an architecture lacks are left out. Numbers:
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64) in Linux 6.18; layout of the
program and of its input: include/uapi/linux/{filter,seccomp,audit}.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Collection
from typing import NamedTuple

from probing.api.errors import PrivilegeError

__all__ = (
    "COLLECTOR",
    "INJECTOR",
    "READER",
    "SERVICE",
    "SYSTEM_CALLS",
    "calls_can_be_refused",
    "program",
    "refuse_calls",
)

# Name, number on x86-64, number on arm64; a dash if the architecture lacks the call.
_TABLE = """
socket 41 198        socketpair 53 199        connect 42 203            bind 49 200             listen 50 201
accept 43 202        accept4 288 242          shmget 29 194             shmat 30 196            msgget 68 186
semget 64 190        mq_open 240 180          memfd_create 319 279      memfd_secret 447 447    userfaultfd 323 282
execve 59 221        execveat 322 281         fork 57 -                 vfork 58 -              ptrace 101 117
kill 62 129          tkill 200 130            rt_sigqueueinfo 129 138   rt_tgsigqueueinfo 297 240
pidfd_open 434 434   pidfd_getfd 438 438      pidfd_send_signal 424 424 process_madvise 440 440 kcmp 312 272
process_vm_readv 310 270 process_vm_writev 311 271 migrate_pages 256 238 move_pages 279 239    unshare 272 97
setns 308 268        chroot 161 51            pivot_root 155 41         mount 165 40            umount2 166 39
move_mount 429 429   open_tree 428 428        fsopen 430 430            fsmount 432 432         mount_setattr 442 442
name_to_handle_at 303 264 open_by_handle_at 304 265 swapon 167 224      swapoff 168 225         reboot 169 142
acct 163 89          quotactl 179 60          quotactl_fd 443 443       sethostname 170 161     setdomainname 171 162
settimeofday 164 170 clock_settime 227 112    clock_adjtime 305 266     adjtimex 159 171        syslog 103 116
init_module 175 105  finit_module 313 273     delete_module 176 106     kexec_load 246 104      kexec_file_load 320 294
bpf 321 280          perf_event_open 298 241  keyctl 250 219            add_key 248 217         request_key 249 218
fanotify_init 300 262 personality 135 92      iopl 172 -                ioperm 173 -            modify_ldt 154 -
setuid 105 146       setgid 106 144           setreuid 113 145          setregid 114 143        setresuid 117 147
setresgid 119 149    setgroups 116 159        capset 126 91             setpriority 141 140     ioprio_set 251 30
sched_setscheduler 144 119 sched_setparam 142 118 sched_setattr 314 274 truncate 76 45          ftruncate 77 46
fallocate 285 47     creat 85 -               mkdir 83 -                mkdirat 258 34          rmdir 84 -
rename 82 -          renameat 264 38          renameat2 316 276         link 86 -               linkat 265 37
symlink 88 -         symlinkat 266 36         unlink 87 -               unlinkat 263 35         mknod 133 -
mknodat 259 33       chmod 90 -               fchmod 91 52              fchmodat 268 53         fchmodat2 452 452
chown 92 -           lchown 94 -              fchown 93 55              fchownat 260 54         utime 132 -
utimes 235 -         futimesat 261 -          utimensat 280 88          setxattr 188 5          lsetxattr 189 6
fsetxattr 190 7      removexattr 197 14       lremovexattr 198 15       fremovexattr 199 16
"""
# Calls that are answered as missing (ENOSYS): glibc then starts threads with clone, whose flags a filter can check.
_ABSENT_TABLE = """
clone3 435 435       openat2 437 437          io_uring_setup 425 425    io_uring_enter 426 426
io_uring_register 427 427
"""
# Calls that are allowed or refused depending on their arguments.
_LOOKED_AT_TABLE = """
clone 56 220         open 2 -                 openat 257 56             tgkill 234 131          prlimit64 302 261
"""
_SOCKETS = "socket socketpair connect bind listen accept accept4"
_FILES = "unlink unlinkat chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat"
# A reader reads the memory of its target and opens files beneath the target's root; it does not write to the target or
# stop it.
READER = frozenset(("process_vm_readv", "openat2"))
# An injector also stops its target and writes to it. While the target is stopped, the injector runs with the highest
# priority.
INJECTOR = frozenset(("ptrace", "process_vm_readv", "process_vm_writev", "sched_setscheduler"))
# The service creates its socket, gives it to a group and removes it.
SERVICE = frozenset(f"{_SOCKETS} {_FILES}".split())
# The collector needs the store's files, BPF, namespaces and the compiler, which inherits the filter.
COLLECTOR = frozenset(
    f"{_SOCKETS} {_FILES} bpf perf_event_open syslog setns process_vm_readv openat2 execve fork vfork clone clone3"
    " open openat creat truncate ftruncate fallocate mkdir mkdirat rmdir rename renameat renameat2 link linkat symlink"
    " symlinkat utime utimes utimensat futimesat kill tgkill pidfd_open pidfd_send_signal prlimit64 memfd_create"
    " capset setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr".split()
)
# The highest number of a system call that was reviewed for this filter, mseal. Calls with higher numbers, and calls of
# x32, are answered as missing.
_NEWEST = 462
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SECCOMP = (317, 277)
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
# Without this flag, kernels before 5.16 slow the process down to prevent an attack that cannot be made with SQL.
_SPEC_ALLOW = 4


class _Instruction(NamedTuple):
    """An instruction of the filter. ``yes`` and ``no``: the numbers of instructions to skip if the test holds, and if
    it does not.
    """

    code: int
    value: int
    yes: int = 0
    no: int = 0


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _numbers(table: str) -> dict[str, tuple[int | None, int | None]]:
    words = iter(table.split())
    return {name: (_number(next(words)), _number(next(words))) for name in words}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


_REFUSED, _ABSENT, _LOOKED_AT = _numbers(_TABLE), _numbers(_ABSENT_TABLE), _numbers(_LOOKED_AT_TABLE)
# Name -> numbers on x86-64 and arm64.
SYSTEM_CALLS = {**_REFUSED, **_ABSENT, **_LOOKED_AT}

_libc = ctypes.CDLL(None, use_errno=True)


def calls_can_be_refused() -> bool:
    """Returns whether the kernel has seccomp filters, and this module has the numbers of the architecture."""
    if platform.machine() not in _ARCHES:
        return False
    action = ctypes.c_uint32(_ERRNO)
    return _seccomp(_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def refuse_calls(kept: Collection[str] = ()) -> bool:
    """Forbids SYSTEM_CALLS except ``kept`` to this thread and to all threads and processes that it starts. Returns
    False if the kernel has no filters.

    Needs no_new_privs. Raises PrivilegeError if the kernel has filters, but refuses this filter.
    """
    if not calls_can_be_refused():
        return False
    data = program(platform.machine(), os.getpid(), kept)
    if _seccomp(_SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_Program(len(data) // 8, data))):
        raise PrivilegeError(f"seccomp: {os.strerror(ctypes.get_errno())}")
    return True


def program(machine: str, pid: int, kept: Collection[str] = ()) -> bytes:
    """Returns the filter for ``machine`` (as in ``platform.machine()``) and process ``pid``, in which the calls
    ``kept`` are allowed.

    The filter is an array of struct sock_filter. Raises KeyError for a machine that is not in the tables.
    """
    arch, column = _ARCHES[machine]
    steps = [
        _Instruction(_LOAD, _ARCH_AT),
        _Instruction(_EQUAL, arch, yes=1),
        _refusal(errno.EPERM),
        _Instruction(_LOAD, _NUMBER_AT),
        _Instruction(_ABOVE, _NEWEST, no=1),
        _refusal(errno.ENOSYS),
    ]
    for calls, code in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for number in (numbers[column] for name, numbers in calls.items() if name not in kept):
            if number is not None:
                steps += (_Instruction(_EQUAL, number, no=1), _refusal(code))
    for name, numbers in _LOOKED_AT.items():
        if (number := numbers[column]) is not None and name not in kept:
            look = _look(name, pid)
            steps += (_Instruction(_EQUAL, number, no=len(look)), *look)
    steps.append(_Instruction(_RETURN, _ALLOW))
    return b"".join(struct.pack("=HBBI", step.code, step.yes, step.no, step.value) for step in steps)


def _look(name: str, pid: int) -> list[_Instruction]:
    """Returns the instructions that allow or refuse the call ``name`` depending on an argument. They check the low half
    of the argument, because the kernel uses only 32 bits of it.
    """
    allow, refuse = _Instruction(_RETURN, _ALLOW), _refusal(errno.EPERM)
    if name == "clone":
        return [_argument(0), _Instruction(_ANY_BIT, _CLONE_THREAD, yes=1), refuse, allow]
    if name in ("open", "openat"):
        flags = _argument(1 if name == "open" else 2)
        return [flags, _Instruction(_ANY_BIT, _WRITES, no=1), _refusal(errno.EACCES), allow]
    if name == "tgkill":
        return [_argument(0), _Instruction(_EQUAL, pid, yes=1), refuse, allow]
    return [_argument(0), _Instruction(_EQUAL, 0, yes=2), _Instruction(_EQUAL, pid, yes=1), refuse, allow]


def _argument(index: int) -> _Instruction:
    return _Instruction(_LOAD, _ARGS_AT + 8 * index)  # both machines are little-endian


def _refusal(code: int) -> _Instruction:
    return _Instruction(_RETURN, _ERRNO | code)


def _seccomp(operation: int, flags: int, argument: object) -> int:
    number = _SECCOMP[_ARCHES[platform.machine()][1]]
    return int(_libc.syscall(number, ctypes.c_uint(operation), ctypes.c_uint(flags), argument))
