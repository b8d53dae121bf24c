"""Warm connections to the confined processes of one kind.

Each connection to ``reader.sock`` or ``parser.sock`` starts a fresh process (inetd style), which ends with its
connection. So a process that does not answer costs one connection. On a busy machine a start takes longer than most
answers, so one that is only late may finish.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import WeakKeyDictionary

from probing.api.errors import InternalError, ProbingError, TargetTimeout
from probing.daemon.ipc import Channel, connect

__all__ = ("IDLE_S", "TRANSFER_S", "Connections")

# A fresh process may take so long until its first answer on a busy machine.
START_TIMEOUT_S = 120.0
# An answer whose first bytes are there is read within so long, s: a process answers in one go.
TRANSFER_S = 1.0
# Between two attempts to start a process that cannot start, s: at first, and at most.
RETRY_S, MAX_RETRY_S = 0.5, 30.0
# Another process starts when no connection was free for BLOCKED_S, about what a process needs to start, and ends after
# IDLE_S without use.
BLOCKED_S, IDLE_S = 0.2, 60.0
# A late process may finish for as long as the last one took to start, within these bounds, s.
MIN_LATE_S, MAX_LATE_S = 0.2, 20.0
_log = logging.getLogger(__name__)


class Connections:
    """Up to ``size`` connections to confined processes named ``name``. Safe for any thread.

    A thread in the background opens ``kept`` of them at once, and the others when a caller waits: each costs memory.
    It closes those others after ``idle_s`` seconds without use.
    """

    def __init__(self, path: str, size: int, name: str, *, kept: int = 1, idle_s: float = IDLE_S) -> None:
        self._path = path
        self._size = size
        self._name = name
        self._kept = kept
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._waiting = 0
        # Since when more callers wait than connections are free, on time.monotonic().
        self._blocked: float | None = None
        # The last one was used last; with the time of its release, on time.monotonic().
        self._idle: list[tuple[Channel, float]] = []
        self._live = 0
        self._opening: Channel | None = None
        self._pids: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()
        self._closed = False
        self._failure: ProbingError | None = None
        self._retry_s = RETRY_S
        self._start_s = 0.0
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Close all connections and so end their processes. A connection in use is closed when it is released."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            if self._opening is not None:
                # Its process may not start any more: systemd starts none of a socket that is about to stop.
                self._opening.hang_up()
            self._changed.notify_all()
        for channel, _ in idle:
            channel.close()
        self._keeper.join(START_TIMEOUT_S)

    def acquire(self, deadline: float) -> Channel:
        """Waits for an idle connection. Raises TargetTimeout when none becomes free, InternalError when none opens.

        ``deadline`` is on time.monotonic().
        """
        with self._changed:
            self._waiting += 1
            if not self._idle and self._blocked is None:
                self._blocked = time.monotonic()
                self._changed.notify_all()
            try:
                while not self._idle:
                    if self._closed:
                        raise InternalError(f"the {self._name}s are closed")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._none_free()
                    self._changed.wait(left)
                return self._idle.pop()[0]
            finally:
                self._waiting -= 1
                self._note_blocked()

    def try_acquire(self) -> Channel | None:
        """An idle connection, or None without waiting."""
        with self._changed:
            if not self._idle or self._closed:
                return None
            channel, _ = self._idle.pop()
            self._note_blocked()
            return channel

    def release(self, channel: Channel) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append((channel, time.monotonic()))
                self._note_blocked()
                # All: the keeper waits for the same condition, and would swallow a single wake-up.
                self._changed.notify_all()
                return
        channel.close()

    def discard(self, channel: Channel) -> None:
        """Close the connection, which ends the process at the other end. A new one is opened in its place."""
        channel.close()
        with self._changed:
            self._live -= 1
            self._changed.notify_all()

    def finish(self, channel: Channel) -> None:
        """Release a connection once its late answer is there, which nobody reads. Discard it if none comes soon."""
        threading.Thread(target=self._await_late, args=(channel,), name=f"late-{self._name}", daemon=True).start()

    def _await_late(self, channel: Channel) -> None:
        try:
            channel.receive(min(max(self._start_s, MIN_LATE_S), MAX_LATE_S)).close_fds()
        except ProbingError:
            self.discard(channel)
        else:
            self.release(channel)

    def _none_free(self) -> ProbingError:
        if self._failure is not None and not self._live:
            return InternalError(f"no {self._name} can be had: {self._failure.message}", hint=self._failure.hint)
        return TargetTimeout(f"no {self._name} was free in time", hint="other processes are slow to read; ask again")

    def _keep(self) -> None:
        while self._await_due():
            try:
                self.release(self._fresh())
                self._failure, self._retry_s = None, RETRY_S
            except ProbingError as e:
                if self._failure is None and not self._closed:
                    _log.warning("no %s can be started: %s", self._name, e.message)
                self._failure = e
                with self._changed:
                    self._live -= 1
                    self._changed.wait_for(lambda: self._closed, self._retry_s)
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _await_due(self) -> bool:
        """Waits until a connection is to be opened, and counts it. Returns False when all are closed."""
        with self._changed:
            while not self._closed:
                due, now = self._due(), time.monotonic()
                if due is not None and due <= now:
                    self._live += 1
                    return True
                # Each change may change when the next one is due.
                self._changed.wait(self._idle_s if due is None else due - now)
                self._end_idle(time.monotonic())
            return False

    def _due(self) -> float | None:
        """Returns when the next connection is to be opened, on time.monotonic(). None: not as things are."""
        if self._live < self._kept:
            return 0.0
        if self._live >= self._size or self._blocked is None:
            return None
        return self._blocked + (BLOCKED_S if self._live else 0.0)

    def _note_blocked(self) -> None:
        """Notes the moment when callers wait for more connections than are free, or that none does."""
        self._blocked = time.monotonic() if self._waiting > len(self._idle) else None

    def _end_idle(self, now: float) -> None:
        while self._idle and self._live > self._kept and now - self._idle[0][1] >= self._idle_s:
            self._idle.pop(0)[0].close()
            self._live -= 1

    def pid_of(self, channel: Channel) -> int:
        """The pid of the process at the other end; 0 when it did not report one."""
        return self._pids.get(channel, 0)

    def _fresh(self) -> Channel:
        begun = time.monotonic()
        channel = connect(self._path)
        with self._changed:
            self._opening = channel
            if self._closed:
                channel.hang_up()
        try:
            answer = channel.request({"op": "ping"}, timeout=START_TIMEOUT_S)
            self._pids[channel] = int(answer.header.get("pid", 0))
            self._start_s = time.monotonic() - begun
        except BaseException:
            channel.close()
            raise
        finally:
            with self._changed:
                self._opening = None
        return channel
