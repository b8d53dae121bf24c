"""Finds out which daemon uses a state directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ("lock_holder",)


def lock_holder(root: Path) -> str:
    """Returns the pid of the daemon that has ``root`` locked, "?" if unknown, "" if it is not locked."""
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
