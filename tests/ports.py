"""Ports for the jobs and servers of tests."""

from __future__ import annotations

import os
import socket
from itertools import count

__all__ = ("free_port",)

# Below the range that the kernel takes ports of outgoing connections from, so that none of these is in use before the
# job listens on it.
FIRST, LAST = 15_000, 31_000
# Processes of tests that started one after another take different ports, also before the other's job listens.
_PROCESSES = 16
_next = count(os.getpid() % _PROCESSES + os.getpid() // _PROCESSES * 37 * _PROCESSES, _PROCESSES)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that this process did not return before: it is part of a job's name."""
    for number in _next:
        port = FIRST + number % (LAST - FIRST)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable")
