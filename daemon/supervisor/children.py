"""Starting the daemon's processes, each by exec with its own rights."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probing.daemon.config import Config
from probing.daemon.supervisor.fatal import ANSWERS, ERROR_FD, MAX_LINE, RESTARTED
from probing.daemon.supervisor.rights import Rights, RightsTable
from probing.daemon.supervisor.runtime import service_config

__all__ = ("Service", "Spawner", "describe")

# -I: neither the directory nor a variable nor a user's own packages may change what is imported.
PROGRAMS = {
    "collector": ("-I", "-m", "probing.daemon.collector"),
    "maintenance": ("-I", "-m", "probing.daemon.confined.store_maintenance"),
    "parser": ("-I", "-m", "probing.daemon.confined.parser"),
    "reader": ("-I", "-m", "probing.daemon.confined.reader"),
    "service": ("-I", "-m", "probing.daemon.service"),
    "sql": ("-I", "-m", "probing.daemon.confined.sql_worker"),
}
log = logging.getLogger("probingd.supervisor")
# So many times longer may the first sign of life take.
FIRST_SIGN = 4
# What writes its stacks needs no longer.
ABORT_S = 3.0
# What is freed goes back to the system: large blocks at once, instead of leaving holes in the heap.
COLLECTOR_MEMORY = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "4194304",
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
            "maintenance": rights.parser,
            "parser": rights.parser,
            "reader": rights.reader,
            "service": rights.service,
            "sql": rights.worker,
        }

    def start(
        self, kind: str, *, connection: socket.socket | None = None, errors: int | None = None, restarted: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a process of ``kind``, ``connection`` as its descriptor 0, ``errors`` the pipe of ``fatal``.

        ``restarted`` is how the one before it ended.
        """
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        # An arena of malloc for each of its threads would cost the collector megabytes.
        environment["MALLOC_ARENA_MAX"] = "2"
        if kind == "collector":
            environment |= COLLECTOR_MEMORY
        if errors is not None:
            environment[ERROR_FD] = str(errors)
        if restarted:
            environment[RESTARTED] = restarted
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
        args = self._service_args if kind == "service" else self._args
        return [*self._rights.command(rights), sys.executable, *self._programs[kind], *args]


@dataclass
class Service:
    """A process that is started again whenever it ends, later each time it fails at once.

    ``seen`` is its last sign of life, ``answers`` whether it answered since its start, ``aborted`` when it was made to
    end for want of a sign.
    """

    kind: str
    process: subprocess.Popen[bytes] | None = None
    errors: int = -1
    started: float = 0.0
    seen: float = 0.0
    answers: bool = False
    aborted: float | None = None
    ends: int = 0
    failures: int = 0
    due: float | None = 0.0
    reason: str = ""
    said: bytes = field(default=b"", repr=False)

    def start(self, spawner: Spawner) -> None:
        self.errors, inherited = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.process = spawner.start(self.kind, errors=inherited, restarted=self.reason)
        finally:
            os.close(inherited)
        self.started = self.seen = time.monotonic()
        self.due = self.aborted = None
        self.answers = False
        self.said = b""

    def listen(self) -> bool:
        """Take what it wrote, which is a sign of life. False when it will write no more."""
        try:
            data = os.read(self.errors, MAX_LINE * 4)
        except BlockingIOError:
            return True
        if data:
            lines = (self.said + data).split(b"\n")
            self.answers |= ANSWERS in lines
            # The error that it ends with, and what is no whole line yet.
            self.said = b"\n".join((*(line for line in lines[:-1] if line not in (b"", ANSWERS)), lines[-1]))
            self.said = self.said[-MAX_LINE * 4 :]
            self.seen = time.monotonic()
        return bool(data)

    def press(self, now: float, hang_s: float) -> None:
        """Make it end, with its stacks in the log, when it gave no sign of life for ``hang_s``."""
        if self.process is None:
            return
        # Its first sign comes when all that it imports is read, from a slow disk perhaps.
        patience = hang_s if self.seen > self.started else FIRST_SIGN * hang_s
        if self.aborted is None and now > self.seen + patience:
            self.aborted = now
            log.error("%s, pid %d, gave no sign of life for %.0f s", self.kind, self.process.pid, now - self.seen)
            self.process.send_signal(signal.SIGABRT)
            # One that was stopped acts on no signal but this.
            self.process.send_signal(signal.SIGCONT)
        elif self.aborted is not None and now > self.aborted + ABORT_S:
            self.process.kill()

    def ended(self, *, again: bool) -> bytes:
        """Take note of the end of the process; ``again``: start it anew. The line it left behind."""
        self.listen()
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
        lines = self.said.split(b"\n")
        return next((line for line in reversed(lines[:-1]) if line), b"")


def describe(code: int) -> str:
    """What ``Popen.returncode`` means, for a log line."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
