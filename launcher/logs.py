"""Log files of ranks: STATE/logs/GROUP/rankR.log and, after a rotation, the older lines in rankR.log.1.

A rank writes to its file itself, so that it never notices whether the launcher runs. A file that has grown too large is
copied to ``.1`` and truncated; lines that are written between the copy and the truncation are lost.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ("log_path", "open_log", "read_log", "rotate")

_MAX_KEPT = 64 << 20
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def log_path(directory: Path, group: str, rank: int) -> Path:
    """Returns the log file of a rank, below the state directory."""
    return directory / "logs" / group / f"rank{rank}.log"


def open_log(path: Path) -> int:
    """Returns the descriptor by which a rank appends to its log; missing directories are created. Raises OSError."""
    for directory in (path.parent.parent, path.parent):
        directory.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is not a regular file")
    os.set_blocking(fd, True)
    return fd


def read_log(path: Path, start: int, limit: int) -> tuple[bytes, int]:
    """Returns at most ``limit`` bytes of a log from position ``start`` on, and the position after them.

    A negative ``start`` counts from the end. A log that has become shorter was rotated, and is read from its start.
    Raises OSError. Never blocks, whatever a rank put in place of the file.
    """
    with open(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file")
        if start < 0:
            start = max(0, status.st_size + start)
        file.seek(start if start <= status.st_size else 0)
        return file.read(limit), file.tell()


def rotate(path: Path, limit: int) -> bool:
    """Truncates a log of at least ``limit`` bytes, after copying its last ``limit`` bytes (at most 64 MiB) to ``.1``.
    Returns whether the log was truncated.

    If the disk is full, the older lines are lost, but the log is truncated. A log that cannot be truncated, such as a
    file that a file server has lost, stays as it is.
    """
    try:
        fd = os.open(path, os.O_RDWR | _FLAGS)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < limit:
            return False
        _keep(fd, path.with_name(f"{path.name}.1"), max(0, status.st_size - min(limit, _MAX_KEPT)))
        os.ftruncate(fd, 0)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _keep(fd: int, older: Path, begin: int) -> None:
    fresh = older.with_name(f"{older.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), "wb") as file:
            # Copies a limited number of bytes, because a rank may write faster than this loop copies.
            left = _MAX_KEPT
            while left > 0 and (copied := os.sendfile(file.fileno(), fd, begin, min(left, 1 << 20))):
                begin += copied
                left -= copied
        fresh.replace(older)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
