"""Processes as psutil shows them; each may end at any time."""

from __future__ import annotations

import psutil

__all__ = ("arguments", "family")


def family(pid: int) -> list[int]:
    """Returns a process and its descendants, also those in sessions of their own, as torchrun's ranks are."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process; [] where it has ended."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
