"""Starting the daemon's processes, each by exec with its own rights."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probing.daemon.config import Config
from probing.daemon.supervisor.fatal import ERROR_FD, MAX_LINE
from probing.daemon.supervisor.rights import Rights, RightsTable
from probing.daemon.supervisor.runtime import service_config

__all__ = ("Service", "Spawner", "describe")

# -I: neither the directory nor a variable nor a user's own packages may change what is imported.
PROGRAMS = {
    "collector": ("-I", "-m", "probing.daemon.collector"),
    "parser": ("-I", "-m", "probing.daemon.parser"),
    "reader": ("-I", "-m", "probing.daemon.reader"),
    "ready": ("-I", "-m", "probing.daemon.supervisor.ready"),
    "service": ("-I", "-m", "probing.daemon.service.main"),
    "sql": ("-I", "-m", "probing.daemon.query.worker"),
}
# A run this long was no failed start, so the next start need not wait.
SETTLED_S = 1.0
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 5.0


class Spawner:
    """Starts processes. ``programs`` is what Python runs, by kind."""

    def __init__(
        self, rights: RightsTable, config: Config, programs: Mapping[str, Sequence[str]] = PROGRAMS
    ) -> None:
        self._rights = rights
        self._args = config.to_args()
        self._service_args = service_config(config).to_args()
        self._programs = programs
        self._of = {
            "collector": rights.collector,
            "parser": rights.parser,
            "reader": rights.reader,
            "ready": rights.service,
            "service": rights.service,
            "sql": rights.worker,
        }

    def start(
        self, kind: str, *, connection: socket.socket | None = None, errors: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process of ``kind``, ``connection`` as its descriptor 0, ``errors`` the pipe for fatal errors."""
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        # An arena of malloc for each of its threads would cost the collector megabytes.
        environment["MALLOC_ARENA_MAX"] = "2"
        if errors is not None:
            environment[ERROR_FD] = str(errors)
        return subprocess.Popen(
            self.command(kind, self._of[kind]),
            stdin=subprocess.DEVNULL if connection is None else connection.fileno(),
            stdout=2,
            env=environment,
            cwd="/",
            close_fds=True,
            umask=0o027,
            pass_fds=() if errors is None else (errors,),
        )

    def command(self, kind: str, rights: Rights) -> list[str]:
        args = self._service_args if kind in ("ready", "service") else self._args
        return [*self._rights.command(rights), sys.executable, *self._programs[kind], *args]


@dataclass
class Service:
    """A process that is started again whenever it ends, later each time it fails at once."""

    kind: str
    process: subprocess.Popen[bytes] | None = None
    errors: int = -1
    started: float = 0.0
    ends: int = 0
    failures: int = 0
    due: float | None = 0.0
    line: bytes = field(default=b"")

    def start(self, spawner: Spawner) -> None:
        self.errors, inherited = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.process = spawner.start(self.kind, errors=inherited)
        finally:
            os.close(inherited)
        self.started = time.monotonic()
        self.due = None

    def ended(self, *, again: bool) -> bytes:
        """Take note of the end of the process; ``again``: start it anew. The line it left behind."""
        self.line = _last_line(self.errors)
        os.close(self.errors)
        self.errors, self.process = -1, None
        self.ends += 1
        now = time.monotonic()
        self.failures = 0 if now - self.started >= SETTLED_S else self.failures + 1
        if again:
            delay = 0.0 if not self.failures else FIRST_DELAY_S * 2 ** min(self.failures - 1, 10)
            self.due = now + min(delay, LAST_DELAY_S)
        else:
            self.due = None
        return self.line


def describe(code: int) -> str:
    """What ``Popen.returncode`` means, for a log line."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def _last_line(fd: int) -> bytes:
    try:
        data = os.read(fd, MAX_LINE * 4)
    except BlockingIOError:
        return b""
    lines = data.split(b"\n")
    return lines[-2] if len(lines) > 1 else b""
