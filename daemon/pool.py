"""Pools of confined processes, each at the other end of a connection: starts and ends them, hands free processes to
callers, and waits for late answers.

Each type of process has a socket (``reader.sock``, ``sql.sock``, …). A connection to it starts a new process, as with
inetd, and the process ends with its connection: a process that does not answer costs only its connection. On a busy
machine a start takes longer than most answers. So a process that is only late gets time to finish, and a start
continues after its caller has given up.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from probing.api.errors import InternalError, ProbingError, TargetTimeout
from probing.daemon.ipc import Channel, Header, connect

__all__ = ("TRANSFER_S", "Child", "Policy", "Pool", "Process")

# The timeout for the rest of an answer after its first bytes, s.
TRANSFER_S = 1.0
# A process that missed its deadline gets as much time to finish as the last start took, within these bounds, s.
MIN_LATE_S, MAX_LATE_S = 0.2, 20.0
# The interval at which a waiting caller calls ``check``, s. ``check`` may notice that the caller's client has gone
# away.
GLANCE_S = 0.05
_log = logging.getLogger(__name__)


class Policy(NamedTuple):
    """The policy of a pool: how many processes it keeps, and when they start and end. ``name``: the type of process, in
    messages. Times are in s.

    ``kept`` processes start at once and wait for callers. More processes start, up to ``size``, when a caller has
    waited for ``blocked_s`` (about the time of a start), or when all processes have been busy for ``long_s``. The
    additional processes end after ``idle_s`` without use, because each costs memory. At most ``at_once`` processes
    start at the same time. A process is replaced after ``uses`` uses. A new process must answer ``greeting`` within
    ``start_s``, which is long because the machine may be busy.

    ``retry_s``: the first and the longest pause between two tries, after a process could not be started. Callers wait
    for the next try. With ``fails_fast`` a caller causes a try at once, and gets the error of this try.
    """

    name: str
    size: int = 1
    kept: int = 1
    at_once: int = 1
    blocked_s: float = 0.2
    long_s: float = math.inf
    idle_s: float = 60.0
    uses: float = math.inf
    greeting: Header = {"op": "ping"}  # noqa: RUF012
    start_s: float = 120.0
    retry_s: tuple[float, float] = (0.5, 30.0)
    fails_fast: bool = False


@dataclass(eq=False, slots=True)
class Process:
    """The process at the other end of ``channel``. ``pid`` is 0 when it did not report one.

    ``since``: when the process became idle or busy; ``until``: when it is ended, even if it is busy. Both are on
    time.monotonic().
    """

    channel: Channel
    pid: int = 0
    uses: int = 0
    since: float = 0.0
    until: float = math.inf


class Pool:
    """The processes behind the socket ``path``. Thread-safe; a background thread starts and ends the processes.

    The process that was used last is used first: its caches are warm, and the others can become idle and end.
    """

    def __init__(self, path: str, policy: Policy) -> None:
        self._path = path
        self._policy = policy
        self._kept = policy.kept
        self._lock = threading.Lock()
        # Callers wait on ``_free``. The keeper thread waits on ``_work``, at most until ``_wakes``.
        self._free = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._wakes = 0.0
        self._waiting = 0
        # When ``_note`` last found more waiting callers than idle and starting processes, on time.monotonic(); None if
        # there are enough processes.
        self._blocked: float | None = None
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        # The number of starts in progress, the number of the last start, and the number of the last failed start.
        self._starts = self._begun = self._failed = 0
        self._starting: set[Channel] = set()
        self._closed = False
        self._failure: ProbingError | None = None
        self._pause = 0.0
        self._retry = 0.0
        self._start_s = 0.0
        self._keeper = threading.Thread(target=self._keep, name=f"{policy.name}-keeper", daemon=True)
        self._keeper.start()

    @property
    def busy(self) -> int:
        """The number of processes in use."""
        return len(self._busy)

    def keep(self, count: int) -> None:
        """Changes the number of processes that wait for callers."""
        with self._lock:
            self._kept = count
            self._work.notify()

    def close(self) -> None:
        """Closes all connections and so ends the processes. A connection in use is closed when it is released."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for channel in self._starting:
                # Otherwise ``_fresh`` could wait in vain: systemd starts no process for a socket that is about to stop.
                channel.hang_up()
            self._free.notify_all()
            self._work.notify()
        for process in idle:
            process.channel.close()
        self._keeper.join()

    def acquire(
        self, deadline: float, *, check: Callable[[], object] = lambda: None, until: float = math.inf
    ) -> Process:
        """Waits for an idle process, at most until ``deadline``, and returns it. A process that is still busy at
        ``until`` is ended. Both times are on time.monotonic().

        ``check`` is called while the caller waits, and may raise. Raises TargetTimeout when no process becomes free,
        InternalError when none can be started.
        """
        with self._lock:
            begun = self._begun
            self._waiting += 1
            try:
                while (process := self._pop(until)) is None:
                    if self._blocked is None:
                        self._note()
                    if self._closed:
                        raise InternalError(f"the {self._policy.name}s are closed")
                    check()
                    left = deadline - time.monotonic()
                    failed = self._policy.fails_fast and self._failed > begun
                    if left <= 0 or failed:
                        raise self._none_free(failed)
                    self._free.wait(min(left, GLANCE_S))
                return process
            finally:
                self._waiting -= 1
                self._note()

    def try_acquire(self) -> Process | None:
        """Returns an idle process, or None if there is none now."""
        with self._lock:
            process = self._pop(math.inf)
            self._note()
            return process

    def release(self, process: Process, *, worn: bool = False) -> None:
        """Gives a process back. ``worn``: it must not be used again."""
        with self._lock:
            self._busy.discard(process)
            process.uses += 1
            kept = not self._closed and not worn and process.uses < self._policy.uses
            if kept:
                process.since, process.until = time.monotonic(), math.inf
                self._idle.append(process)
                self._free.notify()
            self._note()
        if not kept:
            process.channel.close()

    def discard(self, process: Process) -> None:
        """Closes the connection, which ends the process. Another process is started in its place."""
        process.channel.close()
        with self._lock:
            self._busy.discard(process)
            self._note()

    def finish(self, process: Process) -> None:
        """Awaits the late answer of a process, in a thread, and drops the answer. Then releases the process; discards
        it if no answer comes soon.
        """
        name = f"late-{self._policy.name}"
        try:
            threading.Thread(target=self._await_late, args=(process,), name=name, daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self.discard(process)

    def _await_late(self, process: Process) -> None:
        try:
            process.channel.receive(min(max(self._start_s, MIN_LATE_S), MAX_LATE_S)).close_fds()
        except ProbingError:
            self.discard(process)
        else:
            self.release(process)

    def _pop(self, until: float) -> Process | None:
        """Returns an idle process that has not ended, and marks it busy. None if there is none."""
        while self._idle and not self._closed:
            process = self._idle.pop()
            if not _hung_up(process.channel):
                process.since, process.until = time.monotonic(), until
                self._busy.add(process)
                return process
            process.channel.close()
        return None

    @property
    def _live(self) -> int:
        return len(self._idle) + len(self._busy) + self._starts

    def _none_free(self, failed: bool) -> ProbingError:
        name = self._policy.name
        if self._failure is not None and (failed or not self._live):
            return InternalError(f"no {name} can be started: {self._failure.message}", hint=self._failure.hint)
        return TargetTimeout(f"no {name} was free in time", hint="all are busy with other requests; ask again")

    def _note(self) -> None:
        """Updates ``_blocked``, and wakes the keeper if it now has to act before ``_wakes``."""
        self._blocked = time.monotonic() if self._waiting > len(self._idle) + self._starts else None
        if self._next() < self._wakes:
            self._work.notify()

    def _keep(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                self._end(now)
                if self._due() <= now:
                    self._starts += 1
                    self._begun += 1
                    self._note()
                    name = f"{self._policy.name}-start"
                    try:
                        threading.Thread(target=self._start, args=(self._begun,), name=name, daemon=True).start()
                    except RuntimeError as e:  # no thread can be started now
                        self._note_failure(self._begun, InternalError(str(e)))
                    continue
                self._wakes = self._next()
                self._work.wait(None if math.isinf(self._wakes) else self._wakes - now)

    def _next(self) -> float:
        """Returns the time of the next start or end, on time.monotonic()."""
        spare = (process.since + self._policy.idle_s for process in self._spare())
        return min(self._due(), *spare, *(process.until for process in self._busy), math.inf)

    def _spare(self) -> list[Process]:
        return self._idle[: max(0, len(self._idle) - self._kept)]

    def _due(self) -> float:
        """Returns the time of the next start, on time.monotonic(); infinite while none is needed."""
        policy, live = self._policy, self._live
        if self._starts >= policy.at_once or live >= max(policy.size, self._kept):
            return math.inf
        due = self._retry if live < self._kept else math.inf
        if self._blocked is not None:
            blocked = self._blocked + (policy.blocked_s if live else 0.0)
            due = min(due, blocked if policy.fails_fast else max(blocked, self._retry))
        elif self._busy and not self._idle and not self._starts:
            due = min(due, max(self._retry, policy.long_s + max(process.since for process in self._busy)))
        return due

    def _end(self, now: float) -> None:
        """Ends processes that were idle for ``idle_s``, and processes that are busy beyond ``until``."""
        for process in self._spare():
            if now - process.since >= self._policy.idle_s:
                self._idle.remove(process)
                process.channel.close()
        for process in self._busy:
            if process.until <= now:
                process.until = math.inf
                process.channel.hang_up()

    def _start(self, number: int) -> None:
        begun = time.monotonic()
        try:
            process = self._fresh()
        except Exception as e:  # whatever the error is, another start is tried later
            failure = e if isinstance(e, ProbingError) else InternalError(f"{type(e).__name__}: {e}")
            with self._lock:
                self._note_failure(number, failure)
            return
        with self._lock:
            self._starts -= 1
            self._failure, self._pause, self._retry = None, 0.0, 0.0
            process.since = time.monotonic()
            self._start_s = process.since - begun
            if not self._closed:
                # At the front, which is used last: the other processes have warmer caches.
                self._idle.insert(0, process)
                self._free.notify()
                self._note()
                return
        process.channel.close()

    def _note_failure(self, number: int, failure: ProbingError) -> None:
        self._starts -= 1
        if self._failure is None and not self._closed:
            _log.warning("no %s can be started: %s", self._policy.name, failure.message)
        first, last = self._policy.retry_s
        self._pause = min(max(first, 2 * self._pause), last)
        self._failure, self._failed = failure, number
        self._retry = time.monotonic() + self._pause
        self._free.notify_all()
        self._note()

    def _fresh(self) -> Process:
        channel = connect(self._path)
        with self._lock:
            self._starting.add(channel)
            if self._closed:
                channel.hang_up()
        try:
            answer = channel.request(self._policy.greeting, timeout=self._policy.start_s)
            answer.close_fds()
            return Process(channel, int(answer.header.get("pid", 0)))
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._starting.discard(channel)


class Child:
    """A child process with a connection as descriptor 0; ``close`` kills it.

    Its environment is the search path, the language, and ``environment``, nothing else. ``account``: uid and
    gid of the child; None: those of this process. Raises OSError when it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], account: tuple[int, int] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        uid, gid = account or (None, None)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **environment},
                    user=uid,
                    group=gid,
                    extra_groups=() if account else None,
                )
        except OSError:
            self.channel.close()
            raise

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


def _hung_up(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
