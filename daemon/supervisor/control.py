"""Stops and restarts a running daemon from another process, by the lock on its socket.

The lock is a POSIX lock on a file beside the socket; the kernel says who holds it. Only the owner may open the file:
another user could hold a shared lock on it and keep a daemon from starting.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import struct
import time
from pathlib import Path

from probing.api.errors import InternalError, NotFound, PrivilegeError, StoreError, UsageError
from probing.daemon.bpf import pins
from probing.daemon.config import Config

__all__ = (
    "Lock",
    "cleanup",
    "lock_path",
    "owner_of",
    "restart",
    "stop",
)

_FLOCK = struct.Struct("hhqqi4x")


class Lock:
    """A lock that is held until ``release``, or until the process ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def take(cls, config: Config) -> Lock | None:
        """Locks ``config.socket`` and returns the lock; None while a daemon holds it. Raises StoreError for an unusable
        file.
        """
        path = lock_path(config)
        while True:
            fd = _open(path)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except OSError:
                held = False
            if held and _is_at(path, fd):
                return cls(path, fd)
            holder = None if held else _holder(fd)
            if holder is None and not held and _is_at(path, fd):
                # A daemon's lock is exclusive; a shared lock is of a user who opened the file when all could read it.
                path.unlink(missing_ok=True)
            os.close(fd)
            if holder is not None:
                return None

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def lock_path(config: Config) -> Path:
    """Returns the path of the lock file."""
    return Path(config.socket + ".lock")


def owner_of(config: Config) -> int | None:
    """Returns the pid of the supervisor of ``config.socket``, from the kernel; None if no supervisor runs.

    The supervisor must hold an exclusive lock and run as the owner of the file: root, this process's user, or the owner
    of the directory.
    """
    path = lock_path(config)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror}", hint="run this as root") from e
    try:
        owner = _require_file(path, fd).st_uid
        # In a directory that all users may write to, any user can create the lock.
        if owner not in (0, os.geteuid(), path.parent.stat().st_uid):
            return None
        pid = _holder(fd)
        return pid if pid and _user_of(pid) == owner else None
    finally:
        os.close(fd)


def _holder(fd: int) -> int | None:
    """Returns the pid of the holder of an exclusive lock. The query asks for a shared lock, which conflicts only with
    an exclusive lock.
    """
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _user_of(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as e:
        raise StoreError(f"cannot make {path}: {e.strerror}", hint="choose another --socket") from e
    try:
        state = _require_file(path, fd)
        if state.st_uid != os.geteuid():
            hint = f"remove it, or put the socket where only uid {os.geteuid()} may write"
            raise StoreError(f"{path} belongs to uid {state.st_uid}", hint=hint)
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_file(path: Path, fd: int) -> os.stat_result:
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        raise StoreError(f"{path} exists and is not a file", hint="remove it, or choose another --socket")
    return state


def _is_at(path: Path, fd: int) -> bool:
    """Returns whether ``path`` still names the open file: a daemon removes the file when it ends."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


STOP_S = 90.0


def stop(config: Config, *, keep_pins: bool = False) -> None:
    """Stops the daemon of ``config.socket`` and waits for its end. Raises NotFound when none runs."""
    _signal(config, signal.SIGUSR1 if keep_pins else signal.SIGTERM, wait_s=STOP_S)


def restart(config: Config) -> None:
    """Restarts the collector and the service of the daemon; pinned probes keep filling the rings."""
    _signal(config, signal.SIGHUP)


def cleanup(config: Config, *, everything: bool = False) -> int:
    """Removes the pins of ``config.instance``, or of all instances, which ends their programs and links.

    Returns the number of versions whose pins were removed. Raises UsageError while a daemon uses the pins.
    """
    owner = owner_of(config)
    if owner is not None:
        raise UsageError(f"probingd, pid {owner}, uses the pins", hint="`probingd stop` removes them, too")
    return pins.cleanup(None if everything else config.instance, Path(config.probes.bpffs))


def _signal(config: Config, number: signal.Signals, wait_s: float = 0.0) -> None:
    pid = owner_of(config)
    if pid is None or pid <= 0:
        raise NotFound(f"no probingd runs for {config.socket}", hint="name the daemon's socket with --socket")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pidfd refers to one process for good, so this comparison notices a reused pid.
        if owner_of(config) != pid:
            return
        signal.pidfd_send_signal(process, number)
        deadline = time.monotonic() + wait_s
        if wait_s and not select.select([process], [], [], max(0.0, deadline - time.monotonic()))[0]:
            hint = "its log says what it waits for"
            raise InternalError(f"probingd, pid {pid}, did not end within {wait_s:.0f} s", hint=hint)
    except PermissionError as e:
        raise PrivilegeError(f"may not signal probingd, pid {pid}", hint="run this as root") from e
    finally:
        os.close(process)
