"""Sends requests to SQL workers. Each connection to ``sql.sock`` starts a new worker process.

A worker either runs SQL or checks SQL, as the first message says; no process does both. A worker answers the first
message when it is warm; no query is sent to it before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from probing.api.errors import WORKER_ENDED, InternalError, QueryError, QueryRejected, QueryTimeout, TargetTimeout
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Message
from probing.daemon.pool import Policy, Pool, Process
from probing.daemon.query.caller import stop_if, wait_readable

__all__ = ("GATE", "QUERY", "WorkerPool")

# If nobody reads the answer of a worker, the worker is ended this many seconds after the deadline of its query.
GRACE_S = 1.0
_SPLIT = "split it: use WITH for its parts"
_NARROW = "ask again: a new worker runs the query; if the worker ends each time, aggregate or narrow the time range"
# There are more workers than slots for requests (``concurrency``): when a query has run for half a second, another
# worker starts for the next query. Starting a worker costs more CPU than most queries.
QUERY = Policy(
    "SQL worker",
    size=64,
    at_once=64,
    blocked_s=0.0,
    long_s=0.5,
    uses=1000,
    greeting={"op": "warm", "role": "query"},
    retry_s=(0.5, 1.0),
    fails_fast=True,
)
GATE = QUERY._replace(greeting={"op": "warm", "role": "gate"})


class WorkerPool:
    """Keeps workers connected, so that queries need not wait for a worker to start. Thread-safe.

    A worker ends at once when its query is abandoned: closing the connection ends the process.
    """

    def __init__(self, path: str, policy: Policy = QUERY) -> None:
        """Makes the pool. ``policy``: QUERY or GATE; tests pass a copy with some fields changed."""
        self._pool = Pool(path, policy)
        self._checks = policy.greeting == GATE.greeting

    @property
    def busy(self) -> int:
        """Returns the number of workers that are running a query."""
        return self._pool.busy

    def keep(self, count: int) -> None:
        """Changes the number of workers that wait for queries."""
        self._pool.keep(count)

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
                message = self._receive(worker, deadline, cancelled)
                finished = "end" in message.header or "error" in message.header
                if finished:
                    self._pool.release(worker, worn=bool(message.header.get("last")))
                yield message
        finally:
            if not finished:
                self._pool.discard(worker)

    def close(self) -> None:
        self._pool.close()

    def _send(
        self, header: dict[str, object], payload: bytes, deadline: float, cancelled: Callable[[], bool]
    ) -> Process:
        """Sends the request to a warm worker and returns the worker; skips workers that ended meanwhile."""
        while True:
            worker = self._acquired(deadline, cancelled)
            try:
                worker.channel.send(dict(header), payload, timeout=max(deadline - time.monotonic(), 0.001))
                return worker
            except ChannelClosed:
                self._pool.discard(worker)
            except ChannelTimeout:
                self._pool.discard(worker)
                raise QueryTimeout("no worker accepted the query in time") from None
            except BaseException:
                self._pool.discard(worker)
                raise

    def _acquired(self, deadline: float, cancelled: Callable[[], bool]) -> Process:
        try:
            return self._pool.acquire(deadline, check=partial(stop_if, cancelled), until=deadline + GRACE_S)
        except TargetTimeout:
            hint = "the machine is busy: ask again in some seconds"
            raise QueryTimeout("no worker was started in time", hint=hint) from None
        except InternalError as e:
            hint = "the daemon's log says why; `probingd check` finds what is missing"
            raise QueryError("no SQL worker could be started", hint=hint) from e

    def _receive(self, worker: Process, deadline: float, cancelled: Callable[[], bool]) -> Message:
        # The deadline applies even if a message is ready, since the caller may not have read for a while.
        if time.monotonic() >= deadline or not wait_readable(worker.channel.fileno(), deadline, cancelled):
            raise QueryTimeout("the query did not end in time")
        try:
            return worker.channel.receive(max(deadline - time.monotonic(), 0.001))
        except ChannelTimeout:
            raise QueryTimeout("the query did not end in time") from None
        except ChannelClosed:
            # After the deadline the pool itself may have ended the worker.
            if time.monotonic() >= deadline:
                raise QueryTimeout("the query did not end in time") from None
            if self._checks:
                raise QueryRejected("checking the query takes too long", hint=_SPLIT, code=WORKER_ENDED) from None
            raise QueryError("the worker that ran the query ended", hint=_NARROW, code=WORKER_ENDED) from None
