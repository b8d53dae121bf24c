"""Keeps SQL workers warm. A worker is a connection to ``sql.sock``: the listener starts a new process for each.

A worker either runs SQL or checks it; the first message says which. No process does both. A worker reports when it is
warm; until then no query depends on it, so a query that gives up does not end a start that a busy machine makes slow.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probing.api.errors import WORKER_ENDED, QueryError, QueryRejected, QueryTimeout
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message, connect
from probing.daemon.query.cancellation import wait_readable

__all__ = ("WorkerPool",)

# A worker whose answer nobody reads is ended this long after its query's deadline, s.
GRACE_S = 1.0
# A worker that is not warm after so long hangs, s.
START_S = 120.0
# A worker beyond the warm ones ends when it was not needed for so long, s: a start costs more CPU than most queries.
SPARE_S = 60.0
# A query that has run for so long is not about to end: another worker starts, so that the next one need not wait, s.
LONG_S = 0.5
# The error when a worker ends before it has answered, by role.
_ENDED: dict[str, tuple[type[QueryError], str, str]] = {
    "query": (
        QueryError,
        "the worker that ran the query ended",
        "the next query gets a fresh worker; when this one always ends so, aggregate or narrow the time range",
    ),
    "gate": (QueryRejected, "the query takes too long to be checked", "split it: use WITH for its parts"),
}


@dataclass(eq=False)
class _Worker:
    channel: Channel
    started: float
    warm: bool = False
    queries: int = 0
    began: float = -math.inf
    deadline: float = math.inf
    idle_since: float = math.inf


class WorkerPool:
    """Keeps ``warm`` workers connected, so that no query waits for a worker to start; safe for many threads.

    A worker is retired after ``renew_after`` queries, and at once when its query is abandoned: closing the connection
    ends the process. The most recently used worker is taken first: it has most of the log cached, and the others get
    time to start. Workers that were started while all others were busy are kept for SPARE_S.
    """

    def __init__(self, path: str, *, warm: int = 1, renew_after: int = 1_000, role: str = "query") -> None:
        """``role``: ``query`` or ``gate``."""
        self._path = path
        self._role = role
        self._warm = warm
        self._renew_after = renew_after
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def busy(self) -> int:
        """Number of workers with a query."""
        return len(self._busy)

    def fill(self, most: int | None = None) -> None:
        """Connects warm workers, ``most`` at most; ends spare ones, and those past their deadline.

        Call it about once a second. Does nothing while nobody listens on the socket.
        """
        with self._lock:
            now = time.monotonic()
            for worker in (*self._idle, *self._busy):
                end = worker.deadline + GRACE_S if worker.warm else worker.started + START_S
                if end < now:
                    worker.channel.hang_up()
            spare = [worker for worker in self._idle[: -self._warm] if now - worker.idle_since >= SPARE_S]
            self._idle = [worker for worker in self._idle if worker not in spare]
            idle, busy = len(self._idle), len(self._busy)
            warm = self._warm if most is None else min(self._warm, most)
            soon_idle = sum(now - worker.began < LONG_S for worker in self._busy)
            missing = 0 if self._closed else max(warm - idle - busy, 1 - idle - soon_idle)
        for worker in spare:
            worker.channel.close()
        with contextlib.suppress(ChannelClosed):
            for _ in range(missing):
                self._keep(self._start())

    def run(
        self, header: dict[str, object], payload: bytes, *, deadline: float, cancelled: Callable[[], bool]
    ) -> Iterator[Message]:
        """Yields a worker's answer to a request, up to the message with ``end`` or ``error``.

        ``deadline`` is on time.monotonic(). Raises QueryTimeout, and QueryError if the request was cancelled or the
        worker ended.
        """
        worker = self._send(header, payload, deadline, cancelled)
        finished = False
        try:
            while not finished:
                message = self._receive(worker.channel, deadline, cancelled)
                finished = "end" in message.header or "error" in message.header
                if finished:
                    self._give_back(worker, bool(message.header.get("last")))
                yield message
        finally:
            if not finished:
                self._end(worker)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.channel.close()

    def _send(
        self, header: dict[str, object], payload: bytes, deadline: float, cancelled: Callable[[], bool]
    ) -> _Worker:
        """Sends the request to a worker, once it is warm; skips workers that ended while idle."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            fresh = worker is None
            if worker is None:
                worker = self._connect()
            with self._lock:
                self._busy.add(worker)
            try:
                if not fresh and _hung_up(worker.channel):
                    raise ChannelClosed("the worker ended")
                self._warm_up(worker, deadline, cancelled)
                worker.queries += 1
                worker.began, worker.deadline = time.monotonic(), deadline
                worker.channel.send(dict(header), payload, timeout=max(deadline - time.monotonic(), 0.001))
                return worker
            except ChannelClosed as e:
                self._drop(worker)
                if fresh:
                    raise _no_worker() from e
            except BaseException as e:
                if not worker.warm and not isinstance(e, ChannelTimeout):
                    self._keep(worker)
                    raise
                self._drop(worker)
                if isinstance(e, ChannelTimeout):
                    raise QueryTimeout("no worker took the query in time") from None
                raise

    def _warm_up(self, worker: _Worker, deadline: float, cancelled: Callable[[], bool]) -> None:
        if worker.warm:
            return
        if not wait_readable(worker.channel.fileno(), deadline, cancelled):
            raise QueryTimeout("no worker was started in time", hint="the machine is busy: ask again in some seconds")
        # Its only message before a request, and a short one.
        worker.channel.receive(GRACE_S)
        worker.warm = True

    def _connect(self) -> _Worker:
        try:
            return self._start()
        except ChannelClosed as e:
            raise _no_worker() from e

    def _start(self) -> _Worker:
        channel = connect(self._path)
        channel.send({"op": "warm", "role": self._role})
        return _Worker(channel, time.monotonic())

    def _give_back(self, worker: _Worker, last: bool) -> None:
        if last or worker.queries >= self._renew_after:
            self._end(worker)
        else:
            self._keep(worker)

    def _keep(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            worker.deadline, worker.idle_since = math.inf, time.monotonic()
            if not self._closed:
                self._idle.insert(len(self._idle) if worker.queries else 0, worker)
                return
        worker.channel.close()

    def _end(self, worker: _Worker) -> None:
        self._drop(worker)
        self.fill()

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
        worker.channel.close()

    def _receive(self, channel: Channel, deadline: float, cancelled: Callable[[], bool]) -> Message:
        # Checked first, even if a message is there: the deadline includes time in which the caller read nothing.
        if time.monotonic() >= deadline or not wait_readable(channel.fileno(), deadline, cancelled):
            raise QueryTimeout("the query did not end in time")
        try:
            return channel.receive(max(deadline - time.monotonic(), 0.001))
        except ChannelTimeout:
            raise QueryTimeout("the query did not end in time") from None
        except ChannelClosed:
            kind, message, hint = _ENDED[self._role]
            raise kind(message, hint=hint, code=WORKER_ENDED) from None


def _hung_up(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _no_worker() -> QueryError:
    hint = "the daemon's log says why; `probingd check` finds what is missing"
    return QueryError("no SQL worker could be started", hint=hint)
