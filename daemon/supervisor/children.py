"""Starts the daemon's processes, each with its own rights, and restarts processes that end.

``MemoryLimits`` says which memory limit killed a process, by the kernel's counters of cgroups. Version 2 counts in
``memory.events``: ``oom`` in the cgroup whose limit was reached and in all cgroups above. Version 1 counts in
``memory.oom_control``, in the cgroup of the process alone (Documentation/admin-guide/cgroup-v{1/memory,2}.rst).
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from probing.api.text import size
from probing.daemon.config import Config
from probing.daemon.supervisor.health import ANSWERS, ERROR_FD, MAX_LINE, RESTARTED
from probing.daemon.supervisor.ports import PORTS_FD
from probing.daemon.supervisor.rights import Rights, RightsTable
from probing.daemon.supervisor.runtime import service_config

__all__ = (
    "MemoryLimits",
    "Service",
    "Spawner",
    "describe",
    "end",
)

# With -I the imports do not depend on the current directory, on environment variables or on a user's packages.
PROGRAMS = {
    "collector": ("-I", "-m", "probing.daemon.collector"),
    "hook": ("-I", "-m", "probing.daemon.confined.hook"),
    "injector": ("-I", "-m", "probing.daemon.confined.injector"),
    "interpreter": ("-I", "-m", "probing.daemon.confined.interpreter"),
    "maintenance": ("-I", "-m", "probing.daemon.confined.store_maintenance"),
    "nvml": ("-I", "-m", "probing.daemon.confined.nvml"),
    "parser": ("-I", "-m", "probing.daemon.confined.parser"),
    "reader": ("-I", "-m", "probing.daemon.confined.reader"),
    "service": ("-I", "-m", "probing.daemon.service"),
    "sql": ("-I", "-m", "probing.daemon.confined.sql_worker"),
}
log = logging.getLogger("probingd.supervisor")
# The first report may take this many times ``hang_s``.
FIRST_SIGN = 4
# A process that got SIGABRT writes its stacks within this time, s.
ABORT_S = 3.0
# With an arena of malloc for each thread the collector would need megabytes more. The threads that OpenBLAS starts when
# numpy is imported spin for 0.1 s of CPU, and nothing here multiplies matrices.
FEW_THREADS = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
# Freed memory goes back to the system: large blocks at once, so that they leave no holes in the heap.
COLLECTOR_MEMORY = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "4194304",
}
# If a process ran at least this long, s, its start succeeded, and the next start has no delay.
SETTLED_S = 1.0
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 5.0


def _make_urgent(pid: int) -> None:
    """Lets an injector have real-time priority, or, without CAP_SYS_RESOURCE, gives it the highest ordinary priority.

    While it has stopped a process, nothing else may keep it from the CPU.
    """
    try:
        resource.prlimit(pid, resource.RLIMIT_RTPRIO, (1, 1))
    except OSError:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, -20)


class Spawner:
    """Starts processes. ``programs``: arguments for Python, by kind of process."""

    def __init__(self, rights: RightsTable, config: Config, programs: Mapping[str, Sequence[str]] = PROGRAMS) -> None:
        self._rights = rights
        self.configure(config)
        self._programs = programs
        self._of = {
            "collector": rights.collector,
            "hook": rights.parser,
            "injector": rights.injector,
            "interpreter": rights.parser,
            "maintenance": rights.parser,
            "nvml": rights.nvml,
            "parser": rights.parser,
            "reader": rights.reader,
            "service": rights.service,
            "sql": rights.worker,
        }

    def configure(self, config: Config) -> None:
        """Uses ``config`` for the processes that start from now on."""
        self._args = config.to_args()
        self._service_args = service_config(config).to_args()

    def start(
        self,
        kind: str,
        *,
        connection: socket.socket | None = None,
        errors: int | None = None,
        ports: int | None = None,
        restarted: str = "",
    ) -> subprocess.Popen[bytes]:
        """Starts a process of ``kind`` with ``connection`` as descriptor 0 and ``errors`` as the pipe of ``fatal``.

        ``ports``: the process's end of the channel of ``Ports``. ``restarted``: how the previous process ended.
        """
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **FEW_THREADS}
        if kind == "collector":
            environment |= COLLECTOR_MEMORY
        if errors is not None:
            environment[ERROR_FD] = str(errors)
        if ports is not None:
            environment[PORTS_FD] = str(ports)
        if restarted:
            environment[RESTARTED] = restarted
        process = subprocess.Popen(
            self.command(kind, self._of[kind]),
            stdin=subprocess.DEVNULL if connection is None else connection.fileno(),
            stdout=2,
            env=environment,
            cwd="/",
            close_fds=True,
            umask=0o027,
            pass_fds=[fd for fd in (errors, ports) if fd is not None],
        )
        if kind == "injector":
            _make_urgent(process.pid)
        return process

    def command(self, kind: str, rights: Rights) -> list[str]:
        args = self._service_args if kind == "service" else self._args
        return [*self._rights.command(rights), sys.executable, *self._programs[kind], *args]


@dataclass
class Service:
    """A process that is restarted whenever it ends; the delay before a restart grows while its starts fail.

    ``seen``: time of its last report. ``answers``: whether it answered since its start. ``aborted``: when SIGABRT was
    sent because reports were missing. Times are on time.monotonic().
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
    output: bytes = field(default=b"", repr=False)

    def start(self, spawner: Spawner, ports: int | None = None) -> None:
        self.errors, inherited = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.process = spawner.start(self.kind, errors=inherited, ports=ports, restarted=self.reason)
        finally:
            os.close(inherited)
        self.started = self.seen = time.monotonic()
        self.due = self.aborted = None
        self.answers = False
        self.output = b""

    def listen(self) -> bool:
        """Reads the reports of the process. Returns False at the end of the pipe."""
        try:
            data = os.read(self.errors, MAX_LINE * 4)
        except BlockingIOError:
            return True
        if data:
            lines = (self.output + data).split(b"\n")
            self.answers |= ANSWERS in lines
            # Lines with the error that ended the process, and an incomplete line, are kept.
            self.output = b"\n".join((*(line for line in lines[:-1] if line not in (b"", ANSWERS)), lines[-1]))
            self.output = self.output[-MAX_LINE * 4 :]
            self.seen = time.monotonic()
        return bool(data)

    def press(self, now: float, hang_s: float) -> None:
        """Aborts the process after ``hang_s`` without a report; it writes its stacks to the log."""
        if self.process is None:
            return
        # The first report comes after all imports, which may read from a slow disk.
        patience = hang_s if self.seen > self.started else FIRST_SIGN * hang_s
        if self.aborted is None and now > self.seen + patience:
            self.aborted = now
            log.error("%s, pid %d, gave no sign of life for %.0f s", self.kind, self.process.pid, now - self.seen)
            self.process.send_signal(signal.SIGABRT)
            # A stopped process handles SIGABRT only after SIGCONT.
            self.process.send_signal(signal.SIGCONT)
        elif self.aborted is not None and now > self.aborted + ABORT_S:
            self.process.kill()

    def ended(self, *, again: bool) -> bytes:
        """Records the end of the process and returns the last line that it sent. ``again``: schedule a new start."""
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
        lines = self.output.split(b"\n")
        return next((line for line in reversed(lines[:-1]) if line), b"")


def describe(code: int) -> str:
    """Returns a text for a log line about ``code``, a ``Popen.returncode``."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def end(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Terminates processes together, and kills processes that still run after ``seconds``."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        _wait(process, deadline)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        log.warning("pid %d did not end in time and is killed", process.pid)
        process.kill()
        # A process in uninterruptible sleep ends only with its system call: do not wait for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60


class MemoryLimits:
    """The memory limits above this process and its children; ``root`` is where cgroups are mounted."""

    def __init__(self, root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> None:
        # From the cgroup of the process upwards.
        self._groups = list(_groups(root, own))
        self._kills = self._count()

    def reached(self) -> str:
        """Returns a text about the limit that was reached since the last call; empty if no limit was reached."""
        before, self._kills = self._kills, self._count()
        grown = [group for group, old, new in zip(self._groups, before, self._kills, strict=True) if new > old]
        if not grown:
            return ""
        place, limit = _limit(grown[0])
        return f"cgroup {place} reached its memory limit" + (f", {size(limit)}" if limit < _NO_LIMIT else "")

    def _count(self) -> list[int]:
        return [
            _field(group / "memory.events", "oom") + _field(group / "memory.oom_control", "oom_kill")
            for group in self._groups
        ]


def _groups(root: Path, own: Path) -> Iterator[Path]:
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            top = root / "memory"
        elif not controllers:
            top = root / "unified" if (root / "unified").is_dir() else root
        else:
            continue
        group = top / path.strip("/")
        yield from (place for place in (group, *group.parents) if place.is_relative_to(top))


def _limit(group: Path) -> tuple[Path, int]:
    """Returns the nearest cgroup from ``group`` upwards that has a limit, and its bytes."""
    for place in (group, *group.parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = next(iter(_lines(place / name)), "")
            if text.isdigit() and int(text) < _NO_LIMIT:
                return place, int(text)
    return group, _NO_LIMIT


def _field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
