"""One question about many processes, from one thread: every reader that is free has a process to read.

A thread for each process would spend more time waiting for its turn than the readers spend on reading.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from probing.api.errors import ProbingError
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message
from probing.daemon.processes.progress import Progress

__all__ = ("Blocked", "Connections", "ask_round")

_Key = tuple[int, int]
Ask = Callable[[], dict[str, Any]]


class Blocked(ChannelTimeout):
    """A reader neither runs nor waits for a CPU."""


class Connections(Protocol):
    """``pool._Pool``."""

    def acquire(self, deadline: float) -> Channel: ...

    def try_acquire(self) -> Channel | None: ...

    def release(self, channel: Channel) -> None: ...

    def discard(self, channel: Channel) -> None: ...

    def pid_of(self, channel: Channel) -> int: ...


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
    """Each key once, with its answer or the error, in the order in which they come.

    ``asks`` make the request when it is sent. ``deadline`` is on time.monotonic(); a reader that is blocked for
    ``patience`` seconds gives Blocked. The caller owns the descriptors of the answers.
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
                answer = asked.channel.answer(max(0.001, self._deadline - time.monotonic()))
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
                self._connections.discard(asked.channel)
                yield asked.key, Blocked("a reader is blocked") if stuck else ChannelTimeout("no answer in time")

    def _failed(self, asked: _Asked, error: ProbingError) -> ProbingError | None:
        """What to tell; None: it is asked again, since a reader can be killed at any time."""
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
