"""Reads many processes at once: one that fails or is slow delays no other.

``ask_round`` sends one request for each process from a single thread, as long as a reader is free: a thread for each
process would wait longer for its turn than the readers read. ``ask_each`` is for processes that take several requests
each; it needs threads.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from probing.api.errors import ProbingError, TargetTimeout
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message
from probing.daemon.processes.connections import TRANSFER_S, Connections
from probing.daemon.processes.progress import Progress

__all__ = ("GRACE_S", "PATIENCE_S", "Ask", "Blocked", "Failure", "Slow", "ask_each", "ask_round", "seconds_left")

# The transfer of a reader's answer may take so long, beyond the time that it spends on a process.
_MARGIN_S = 0.05
# A reader takes about a millisecond for a process; one that is blocked for longer than this must not delay the others.
PATIENCE_S = 0.04
# A reader keeps the deadline itself. One that is stuck is given up this much later, and its target is left alone.
GRACE_S = 1.0
_HINT = "ask for fewer processes, or wait longer"
_Key = tuple[int, int]
_Row = TypeVar("_Row")
Ask = Callable[[], dict[str, Any]]


class Failure(NamedTuple):
    """A process that could not be read, and why."""

    pid: int
    start_ns: int
    error: ProbingError


class Blocked(ChannelTimeout):
    """A reader neither runs nor waits for a CPU."""


class Slow(ChannelTimeout):
    """A reader runs, or waits for a CPU, and has not answered."""


@dataclass(slots=True)
class _Asked:
    key: _Key
    ask: Ask
    channel: Channel
    progress: Progress
    looked: float
    again: bool


def ask_round(
    connections: Connections, asks: Mapping[_Key, Ask], deadline: float, patience: float
) -> Iterator[tuple[_Key, Message | ProbingError]]:
    """Yields each process once with its answer or error, in the order of arrival.

    The functions in ``asks`` return the request; each is called when a reader is free. ``deadline`` is on
    time.monotonic(). A reader that is blocked for ``patience`` seconds gives Blocked. The caller owns the answers'
    descriptors.
    """
    return iter(_Round(connections, asks, deadline, patience))


class _Round:
    def __init__(self, connections: Connections, asks: Mapping[_Key, Ask], deadline: float, patience: float) -> None:
        self._connections = connections
        self._waiting = deque((key, ask, False) for key, ask in asks.items())
        self._deadline = deadline
        # Two looks, so that one is over when the patience is.
        self._look_s = patience / 2
        self._busy: dict[int, _Asked] = {}
        self._readable = select.poll()

    def __iter__(self) -> Iterator[tuple[_Key, Message | ProbingError]]:
        try:
            while self._waiting or self._busy:
                yield from self._send()
                yield from self._receive()
        finally:
            for asked in self._busy.values():
                self._connections.discard(asked.channel)

    def _send(self) -> Iterator[tuple[_Key, ProbingError]]:
        while self._waiting:
            try:
                channel = self._connections.try_acquire() if self._busy else self._connections.acquire(self._deadline)
            except ProbingError as e:
                yield from ((key, e) for key, _, _ in self._waiting)
                self._waiting.clear()
                return
            if channel is None:
                return
            key, ask, again = self._waiting.popleft()
            progress = Progress(self._connections.pid_of(channel))
            asked = _Asked(key, ask, channel, progress, time.monotonic(), again)
            try:
                channel.send(ask())
            except ProbingError as e:
                if error := self._failed(asked, e):
                    yield key, error
            else:
                self._busy[channel.fileno()] = asked
                self._readable.register(channel.fileno(), select.POLLIN)

    def _receive(self) -> Iterator[tuple[_Key, Message | ProbingError]]:
        if not self._busy:
            return
        for fd, _ in self._readable.poll(self._look_s * 1000):
            asked = self._forget(fd)
            try:
                answer = asked.channel.answer(TRANSFER_S)
            except ProbingError as e:
                if error := self._failed(asked, e):
                    yield asked.key, error
            else:
                self._connections.release(asked.channel)
                yield asked.key, answer
        yield from self._give_up()

    def _give_up(self) -> Iterator[tuple[_Key, ProbingError]]:
        now = time.monotonic()
        for fd, asked in list(self._busy.items()):
            if now - asked.looked < self._look_s:
                continue
            asked.looked = now
            stuck = asked.progress.none_since_last()
            if stuck or now > self._deadline:
                self._forget(fd)
                if stuck:
                    self._connections.discard(asked.channel)
                    yield asked.key, Blocked("a reader is blocked")
                else:
                    self._connections.finish(asked.channel)
                    yield asked.key, Slow("no answer in time")

    def _failed(self, asked: _Asked, error: ProbingError) -> ProbingError | None:
        """The error to yield. None: the request is sent again, since a reader can be killed at any time."""
        if not isinstance(error, (ChannelClosed, ChannelTimeout)):
            self._connections.release(asked.channel)
            return error
        self._connections.discard(asked.channel)
        if isinstance(error, ChannelClosed) and not asked.again:
            self._waiting.append((asked.key, asked.ask, True))
            return None
        return error

    def _forget(self, fd: int) -> _Asked:
        self._readable.unregister(fd)
        return self._busy.pop(fd)


def ask_each(
    pool: Executor, targets: Iterable[_Key], ask: Callable[[int, int], list[_Row]], deadline: float, what: str
) -> tuple[list[_Row], list[Failure]]:
    """Calls ``ask(pid, start_ns)`` in the threads of ``pool``; returns the rows of all, and the targets that failed.

    ``deadline`` is on time.monotonic(); ``what`` names the rows in the message of a timeout.
    """
    asked = [(t, pool.submit(ask, *t)) for t in dict.fromkeys(targets)]
    rows: list[_Row] = []
    failures: list[Failure] = []
    for target, future in asked:
        outcome = _outcome(target, future, deadline, what)
        if isinstance(outcome, Failure):
            failures.append(outcome)
        else:
            rows += outcome
    return rows, failures


def seconds_left(deadline: float, what: str = "the process") -> float:
    """Seconds until ``deadline`` (time.monotonic()). Raises TargetTimeout when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TargetTimeout(f"there was no time left for {what}", hint=_HINT)
    return seconds


def _outcome(target: _Key, future: Future[list[_Row]], deadline: float, what: str) -> list[_Row] | Failure:
    try:
        return future.result(max(0.0, deadline + _MARGIN_S - time.monotonic()))
    except ProbingError as e:
        return Failure(*target, e)
    except FutureTimeout:
        future.cancel()
        return Failure(*target, TargetTimeout(f"the {what} could not be read in time", hint=_HINT))
