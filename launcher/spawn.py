"""Starts ranks, each as a process that waits until it is recorded, and the keeper of leases."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from probing.launcher.census import set_subreaper
from probing.launcher.logs import open_log
from probing.launcher.processes import Handle, stat_of

__all__ = ("Plan", "Started", "plan_bytes", "spawn", "start_keeper")

_SHIM, _KEEPER = (str(Path(__file__).with_name(name)) for name in ("shim.py", "keeper.py"))
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
# The lowest descriptor that is used: if the launcher was started without 0, 1 and 2, no new descriptor is one of these.
_LEAST_FD = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run. ``header``: the first line of its log, in which PID stands for the pid. ``mark``: variables by
    which the process is found before it runs its command.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    mark: Mapping[str, str]
    cwd: str
    header: str
    log: Path


@dataclass(slots=True)
class Started:
    """A process that waits for ``run``. ``report``: a descriptor that yields the reason if the command cannot run."""

    handle: Handle
    report: int
    go: int

    def run(self) -> None:
        """Lets the process run its command."""
        # If the process has ended, its exit status says why.
        with suppress(OSError):
            os.write(self.go, b"g")
        self.cancel()

    def cancel(self) -> None:
        """Ends the process, unless ``run`` was called."""
        if self.go >= 0:
            os.close(self.go)
        self.go = -1


def plan_bytes(plan: Plan) -> bytes:
    """Returns the texts of a plan, with a zero byte between them. Raises ValueError if they cannot be passed to a
    program.
    """
    variables = [f"{name}={value}" for name, value in plan.env.items()]
    texts = [plan.header, plan.cwd, str(len(plan.words)), *plan.words, *variables]
    if any("\0" in text for text in texts):
        raise ValueError("it has a zero byte")
    try:
        return b"\0".join(map(os.fsencode, texts))
    except UnicodeEncodeError:
        raise ValueError("it has text that is not Unicode") from None


def spawn(plan: Plan) -> Started:
    """Starts the process in a session of its own, with output to its log. Raises OSError or ValueError."""
    text = plan_bytes(plan)
    opened: list[int] = []
    try:
        log = _high(open_log(plan.log), opened)
        payload = _high(os.memfd_create("plan", os.MFD_CLOEXEC), opened)
        with open(payload, "wb", closefd=False) as file:
            file.write(text)
        os.lseek(payload, 0, os.SEEK_SET)
        waits, go = (_high(fd, opened) for fd in os.pipe())
        report, reports = (_high(fd, opened) for fd in os.pipe())
        os.set_blocking(report, False)
        pid = _spawn(plan, log, (waits, payload, reports))
        # The process is our child and not reaped, so no other process has its pid. If it cannot be watched, closing
        # ``go`` ends it.
        stat = stat_of(pid)
        handle = Handle.open(pid, stat.start_ns) if stat else None
        if handle is None:
            raise OSError(None, f"process {pid} cannot be found in /proc")
        for fd in (go, report):
            opened.remove(fd)
        return Started(handle, report, go)
    finally:
        for fd in opened:
            os.close(fd)


def start_keeper(directory: Path, node: str) -> None:
    """Starts the keeper of a launcher's state directory, unless the keeper runs already. Raises OSError.

    The keeper is not a child of this process, because children of this process would count as processes of ranks.
    """
    words = [sys.executable, "-I", "-B", _KEEPER, str(directory), node, *sys.path]
    actions = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in range(3)]
    set_subreaper(False)
    try:
        # The started process forks the keeper, and ends.
        os.waitpid(os.posix_spawn(sys.executable, words, os.environ, file_actions=actions, setsid=True), 0)
    finally:
        set_subreaper(True)


def _spawn(plan: Plan, log: int, inherited: tuple[int, int, int]) -> int:
    for fd in inherited:
        os.set_inheritable(fd, True)
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    copies = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    words = [sys.executable, "-I", "-S", "-B", _SHIM, *map(str, inherited)]
    return os.posix_spawn(
        sys.executable,
        words,
        {**os.environ, **plan.mark},
        file_actions=[*actions, *copies],
        setsid=True,
        setsigmask=(),
        setsigdef=_SIGNALS,
    )


def _high(fd: int, opened: list[int]) -> int:
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD)
    finally:
        os.close(fd)
    opened.append(high)
    return high
