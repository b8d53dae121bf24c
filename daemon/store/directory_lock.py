"""The lock of a state directory, which lets only one daemon at a time use the directory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from probing.api.errors import StateLocked, StoreError, StoreFull
from probing.daemon.store.files import FILE_MODE

__all__ = ("kept_unused", "lock_directory", "lock_holder")


def lock_directory(path: Path) -> int:
    """Locks a state directory for this process; closing the returned descriptor unlocks it.

    Raises StateLocked with the pid of the daemon that uses it, or StoreError when the directory cannot be written.
    """
    lock = path / "lock"
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise StoreFull(f"the state directory {path} is full") from e
        raise StoreError(
            f"the state directory {path} is not writable: {e.strerror}",
            hint="give it to the user that the collector runs as, or choose another --state-dir",
        ) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise StateLocked(f"the state directory {path} is in use by another daemon (pid {owner})") from e
    # The pid in the file is only for messages; a full disk may have no space for it.
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


@contextmanager
def kept_unused(source: Path) -> Iterator[None]:
    """Context manager that keeps daemons from using the state directory ``source``. Raises StateLocked when a daemon
    already uses the directory.
    """
    try:
        fd = os.open(source / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StateLocked(f"a daemon uses {source}", hint="stop it, or import a copy of the directory") from None
    try:
        yield
    finally:
        os.close(fd)


def lock_holder(root: Path) -> str:
    """Returns the pid of the daemon that has locked ``root``, "?" if unknown, "" if it is not locked."""
    try:
        fd = os.open(root / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ""
