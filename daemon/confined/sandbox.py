"""Drops the rights of a process before it reads anything: sets limits, forbids new privileges, files and system calls.

Landlock (Linux 5.13) hides all files except listed files from the process and the threads that it starts. seccomp
refuses the system calls that the process does not need. A mechanism that the kernel lacks is left out. Numbers:
include/uapi/linux/{landlock,ioprio}.h and the generic syscall table; they are the same on x86-64 and arm64.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import probing.api
import probing.daemon
import probing.diagnosis
import probing.federation
from probing.api.errors import PrivilegeError
from probing.daemon.confined.seccomp import refuse_calls

__all__ = ("MemoryBound", "confine", "landlock_abi", "limit", "restrict", "stand_back")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 15
# The masks of all rights. The key is the first version of the ABI that has the rights of the mask.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS = {4: 0b11}
_SCOPES = {6: 0b11}
MAX_DESCRIPTORS = 4096
_SYSTEM_PATHS = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/null",
    "/dev/urandom",
    # DuckDB 2.0.0 ends with an internal error if it sees the limits of its cgroup but cannot open them.
    "/proc/self/cgroup",
    "/sys/fs/cgroup",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/devices/system/cpu",
)

NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_LOWEST_BEST_EFFORT = 2 << 13 | 7
# If memory runs out, the kernel kills this process before the job, whose score is 0.
_OOM_SCORE = 500

_PACKAGES = (probing.api, probing.daemon, probing.diagnosis, probing.federation)
_libc = ctypes.CDLL(None, use_errno=True)


def limit(memory_bytes: int, cpu_seconds: int, *, descriptors: int = MAX_DESCRIPTORS, file_bytes: int = 0) -> None:
    """Limits address space, descriptors, CPU time and file size; an allocation beyond the limit fails."""
    wanted = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NOFILE: descriptors,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        _set_limit(kind, value)


class MemoryBound:
    """Limits the private writable memory that this process allocates from now on to ``size`` bytes.

    The kernel counts this memory (RLIMIT_DATA, which includes mappings since Linux 4.7): an allocation beyond the limit
    fails, so resident memory stays below the limit. Create the object before ``confine``, and call ``start`` when
    everything is loaded and warm.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._start = 0

    def start(self) -> None:
        self._start = self._data()
        _set_limit(resource.RLIMIT_DATA, self._start + self._size)

    @property
    def used(self) -> float:
        """The used share of ``size``, 0 to 1."""
        return (self._data() - self._start) / self._size

    def _data(self) -> int:
        # The fields of statm, in pages: size, resident, shared, text, 0, data and stack, 0.
        return int(os.pread(self._statm, 200, 0).split()[5]) * resource.getpagesize()


def stand_back(niceness: int = NICENESS) -> None:
    """Gives the job and the collector priority over this process for CPU and disk. If memory runs out, the kernel kills
    this process first.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    if number := _IOPRIO_SET.get(platform.machine()):
        _libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _LOWEST_BEST_EFFORT)
    with contextlib.suppress(OSError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(max(_OOM_SCORE, int(path.read_text()))))


def confine(
    readable: Iterable[str],
    devices: Sequence[str] = (),
    *,
    executable: Iterable[str] = (),
    kept: Collection[str] = (),
) -> bool:
    """Restricts this process to reading ``readable`` and the interpreter's files, and refuses the system calls of
    ``seccomp`` except ``kept``. Files below ``executable`` may be read and executed.

    ``devices``: device files, or folders of device files, which the process may also write and control by ioctl; if the
    kernel cannot hide files, only the file modes limit access to them. Call this before threads start, since a running
    thread keeps its rights. Returns False if the kernel cannot hide files.
    """
    _no_new_privs()
    hidden = _hide_files(readable, devices, executable)
    refuse_calls((*kept, "open", "openat") if devices else kept)
    return hidden


def restrict(kept: Collection[str]) -> None:
    """Forbids this process the system calls of ``seccomp`` except ``kept``. Call this before threads start."""
    _no_new_privs()
    refuse_calls(kept)


def _no_new_privs() -> None:
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise PrivilegeError(f"no_new_privs: {os.strerror(ctypes.get_errno())}")


def _hide_files(readable: Iterable[str], devices: Iterable[str], executable: Iterable[str]) -> bool:
    abi = landlock_abi()
    if abi < 1:
        return False
    fs_rights = _upto(_FS_RIGHTS, abi)
    ruleset = _create_ruleset(fs_rights, _upto(_NET_RIGHTS, abi), _upto(_SCOPES, abi), abi)
    try:
        for path in (*_interpreter_paths(), *executable):
            _allow(ruleset, path, (_READ_FILE | _READ_DIR | _EXECUTE) & fs_rights)
        for path in readable:
            _allow(ruleset, path, (_READ_FILE | _READ_DIR) & fs_rights)
        for path in devices:
            _allow(ruleset, path, (_READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV) & fs_rights)
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return True


def landlock_abi() -> int:
    """Returns the version of the kernel's Landlock ABI; 0 or less if the kernel has no Landlock."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _upto(rights: dict[int, int], abi: int) -> int:
    return max((mask for since, mask in rights.items() if since <= abi), default=0)


def _create_ruleset(fs: int, net: int, scopes: int, abi: int) -> int:
    # struct landlock_ruleset_attr grew with the ABI; a kernel accepts the size of its own ABI.
    fields = (fs,) if abi < 4 else (fs, net) if abi < 6 else (fs, net, scopes)
    data = struct.pack(f"{len(fields)}Q", *fields)
    return _check(
        _libc.syscall(_CREATE_RULESET, data, ctypes.c_size_t(len(data)), ctypes.c_uint32(0)), "landlock_create_ruleset"
    )


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no rule
    try:
        if not Path(path).is_dir():
            rights &= ~_READ_DIR
        data = struct.pack("=Qi", rights, fd)  # struct landlock_path_beneath_attr is packed
        _check(
            _libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, data, ctypes.c_uint32(0)), f"landlock rule for {path}"
        )
    finally:
        os.close(fd)


def _interpreter_paths() -> set[str]:
    """Returns the folders of imports and shared libraries."""
    ours = (str(Path(next(iter(package.__path__))).resolve()) for package in _PACKAGES)
    site = (path for path in sys.path if path and Path(path).is_relative_to(sys.prefix))
    return {sys.prefix, sys.base_prefix, *ours, *site, *_SYSTEM_PATHS}


def _check(result: int, what: str) -> int:
    if result < 0:
        raise PrivilegeError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return int(result)
