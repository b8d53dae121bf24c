"""Warm SQL workers. A worker is a connection to ``sql.sock``: whoever listens there starts a fresh process for each."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probing.api.errors import QueryError, QueryTimeout
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message, connect

__all__ = ("WorkerPool",)

# How soon a caller that went away is noticed.
_GLANCE_MS = 50


@dataclass
class _Worker:
    channel: Channel
    queries: int = 0


class WorkerPool:
    """Keeps ``warm`` workers connected, so that their start is not part of a query; safe for many threads.

    A worker is retired after ``renew_after`` queries, and at once when its query is given up: closing the connection
    ends it.
    """

    def __init__(self, path: str, *, warm: int = 2, renew_after: int = 100) -> None:
        self._path = path
        self._warm = warm
        self._renew_after = renew_after
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def fill(self) -> None:
        """Connect workers ahead of need; quiet when nobody listens yet."""
        with self._lock:
            missing = 0 if self._closed else self._warm - len(self._idle)
        with contextlib.suppress(ChannelClosed):
            for _ in range(missing):
                self._keep(_Worker(connect(self._path)))

    def run(
        self, header: dict[str, object], payload: bytes, *, deadline: float, cancelled: Callable[[], bool]
    ) -> Iterator[Message]:
        """The messages with which a worker answers, up to and with the one that has ``end`` or ``error``.

        ``deadline``: on time.monotonic(). Raises QueryTimeout, or QueryError when it was cancelled or the worker died.
        """
        worker = self._send(header, payload)
        finished = False
        try:
            while not finished:
                message = _receive(worker.channel, deadline, cancelled)
                finished = "part" not in message.header
                if finished:
                    self._give_back(worker, bool(message.header.get("last")))
                yield message
        finally:
            if not finished:
                worker.channel.close()
                self.fill()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.channel.close()

    def _send(self, header: dict[str, object], payload: bytes) -> _Worker:
        """Hand the query to a worker; one that died while it was idle is passed over."""
        while True:
            with self._lock:
                worker = self._idle.pop(0) if self._idle else None
            fresh = worker is None
            if worker is None:
                worker = self._connect()
            try:
                if not fresh and _hung_up(worker.channel):
                    raise ChannelClosed("the worker ended")
                worker.channel.send(dict(header), payload)
            except ChannelClosed as e:
                worker.channel.close()
                if fresh:
                    raise _no_worker() from e
            else:
                worker.queries += 1
                return worker

    def _connect(self) -> _Worker:
        try:
            return _Worker(connect(self._path))
        except ChannelClosed as e:
            raise _no_worker() from e

    def _give_back(self, worker: _Worker, last: bool) -> None:
        if last or worker.queries >= self._renew_after:
            worker.channel.close()
            self.fill()
        else:
            self._keep(worker)

    def _keep(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._warm:
                self._idle.append(worker)
                return
        worker.channel.close()


def _receive(channel: Channel, deadline: float, cancelled: Callable[[], bool]) -> Message:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while not poll.poll(_GLANCE_MS):
        if cancelled():
            raise QueryError("the query was cancelled: nobody waits for its answer")
        if time.monotonic() >= deadline:
            raise QueryTimeout("the query did not end in time")
    try:
        return channel.receive(max(deadline - time.monotonic(), 0.001))
    except ChannelTimeout:
        raise QueryTimeout("the query did not end in time") from None
    except ChannelClosed:
        hint = "the next query gets a fresh worker; when this one always ends so, aggregate or narrow the time range"
        raise QueryError("the worker that ran the query ended", hint=hint) from None


def _hung_up(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _no_worker() -> QueryError:
    hint = "the daemon's log says why; `probingd check` finds what is missing"
    return QueryError("no SQL worker could be started", hint=hint)
