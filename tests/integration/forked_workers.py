"""Workers of queries as forks of a process that has imported what they import: a start takes a tenth of the CPU time.

All else of a worker's start is that of ``python -m probing.daemon.confined.sql_worker``: its rights, limits and memory.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ("ForkedWorker", "forked_worker")

_NURSERY = Path(__file__).with_name("worker_nursery.py")


class ForkedWorker:
    """What tests use of ``subprocess.Popen``. How it ended is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = None

    def poll(self) -> int | None:
        return 0 if self._ended(0) else None

    def wait(self, timeout: float) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return 0

    def kill(self) -> None:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _ended(self, timeout: float) -> bool:
        if self._handle is not None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            if not waiting.poll(timeout * 1000):
                return False
            os.close(self._handle)
            self._handle = None
        return True


class _Nursery:
    """The process that forks, one for all tests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, str(_NURSERY), str(theirs.fileno())]
            # As a worker sets them before it imports Arrow and DuckDB.
            early = {"ARROW_DEFAULT_MEMORY_POOL": "system", "DUCKDB_JE_MALLOC_CONF": "retain:false"}
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, **early}
            )
        atexit.register(self._close)

    def fork(self, arguments: Sequence[str], connection: socket.socket) -> int:
        handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [connection.fileno()]))]
        with self._lock:
            self._asker.sendmsg([json.dumps(list(arguments)).encode()], handed)
            return int(self._asker.recv(100))

    def _close(self) -> None:
        self._asker.close()
        self._process.wait(10)


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def forked_worker(arguments: Sequence[str], connection: socket.socket) -> ForkedWorker:
    """Starts a worker with ``arguments`` that serves ``connection``."""
    return ForkedWorker(_nursery().fork(arguments, connection))
