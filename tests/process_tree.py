"""Processes as /proc shows them; each may end at any time."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ("arguments", "family")


def family(pid: int) -> list[int]:
    """Returns a process and its descendants, also those in sessions of their own, as torchrun's ranks are."""
    found, pending = [], [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            pending += [int(p) for p in Path(f"/proc/{current}/task/{current}/children").read_text().split()]
            found.append(current)
    return found


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process; [] where it has ended."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.decode(errors="replace").split("\0")[:-1]
