"""Requests to reader processes, with a deadline each. A target whose read did not end is not read for a while."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from probing.api.errors import ProbingError, TargetTimeout
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message
from probing.daemon.processes.ask_many import Ask, Blocked, Slow, ask_round
from probing.daemon.processes.connections import TRANSFER_S, Connections
from probing.daemon.processes.progress import Progress
from probing.daemon.processes.quarantine import Quarantine, Quarantines

__all__ = ("ReaderPool",)

QUARANTINE_S = 30.0
# The first one of a target whose caller has a ``patience``, since it may only have been swapped out, and of one whose
# reader is slow, since the machine may be busy.
SHORT_QUARANTINE_S = 2.0
# Between the two looks at a reader that has not answered in time, ms.
_LOOK_MS = 100
# A reader that runs, or waits for a CPU, has so much more of the time: a new one would take longer to start.
_EXTRA = 2
_Key = tuple[int, int]


class _Stuck(ChannelTimeout):
    """A reader has had all its time, and neither runs nor waits for a CPU."""


class ReaderPool:
    """Reads targets through ``size`` reader processes at ``socket_path``. Safe for any thread."""

    def __init__(self, socket_path: str, size: int = 3, *, quarantine_s: float = QUARANTINE_S) -> None:
        self.size = size
        self._pool = Connections(socket_path, size, "reader")
        self._quarantine_s = quarantine_s
        self._quarantines = Quarantines()

    def close(self) -> None:
        self._pool.close()

    def call(
        self,
        op: str,
        *,
        pid: int = 0,
        start_ns: int = 0,
        timeout: float = 2.0,
        patience: float | None = None,
        **args: Any,
    ) -> Message:
        """Send a request to a reader (``confined/reader.py`` lists the ops). The caller owns the answer's descriptors.

        ``timeout`` in seconds includes the wait for a free reader. A reader that is blocked, not only slow, is given up
        after ``patience`` seconds; without one, a slow reader has three times as long. ``pid`` 0 is for requests about
        many processes. Raises ProcessGone, TargetTimeout (at once while the target is in quarantine), another
        TargetError, PrivilegeError, or InternalError when there are no readers.
        """
        deadline = time.monotonic() + timeout
        self._quarantines.refuse(pid, start_ns)
        header = {"op": op, "pid": pid, "start_ns": start_ns, **args}
        try:
            answer = self._ask(header, deadline, patience)
        except ChannelTimeout as e:
            raise self._given_up((pid, start_ns), op, e, timeout) from e
        self._quarantines.end(pid, start_ns)
        return answer

    def call_each(
        self, op: str, asks: Mapping[_Key, Ask], *, timeout: float, patience: float
    ) -> Iterator[tuple[_Key, Message | ProbingError]]:
        """``call`` for many processes (pid, start_ns) at once: yields each with its answer or error.

        The functions in ``asks`` return the further arguments; each is called when a reader is free. Answers are in the
        order in which they arrive.
        """
        deadline = time.monotonic() + timeout
        free: dict[_Key, Ask] = {}
        for key, ask in asks.items():
            try:
                self._quarantines.refuse(*key)
            except TargetTimeout as e:
                yield key, e
            else:
                free[key] = partial(_request, op, key, ask)
        for key, answer in ask_round(self._pool, free, deadline, patience):
            if isinstance(answer, ChannelTimeout):
                yield key, self._given_up(key, op, answer, timeout)
            else:
                self._quarantines.end(*key)
                yield key, answer

    def quarantined(self) -> list[Quarantine]:
        """The targets that are in quarantine now."""
        return self._quarantines.current()

    def forget(self, pid: int, start_ns: int) -> None:
        """The process ended: drop its quarantine."""
        self._quarantines.end(pid, start_ns)

    def _ask(self, header: dict[str, Any], deadline: float, patience: float | None) -> Message:
        channel = self._pool.acquire(deadline)
        try:
            try:
                answer = self._request(channel, header, deadline, patience)
            except ChannelClosed:
                # A reader can be killed at any time; the next one answers the same.
                self._pool.discard(channel)
                channel = self._pool.acquire(deadline)
                answer = self._request(channel, header, deadline, patience)
        except Slow:
            self._pool.finish(channel)
            raise
        except (ChannelClosed, ChannelTimeout):
            self._pool.discard(channel)
            raise
        except ProbingError:
            self._pool.release(channel)
            raise
        except BaseException:
            self._pool.discard(channel)
            raise
        self._pool.release(channel)
        return answer

    def _request(self, channel: Channel, header: dict[str, Any], deadline: float, patience: float | None) -> Message:
        channel.send(header)
        readable = select.poll()
        readable.register(channel.fileno(), select.POLLIN)
        progress = Progress(self._pool.pid_of(channel))
        if patience is None:
            left = max(0.0, deadline - time.monotonic())
            last = deadline + _EXTRA * left
            if not readable.poll(left * 1000):
                progress.none_since_last()
                while not readable.poll(_LOOK_MS):
                    if progress.none_since_last():
                        raise _Stuck("a reader does not come back")
                    if time.monotonic() > last:
                        raise Slow("no answer in time")
            return channel.answer(TRANSFER_S)
        # Two looks, so that one is over when the patience is.
        while not readable.poll(patience * 500):
            if progress.none_since_last():
                raise Blocked("a reader is blocked")
            if time.monotonic() > deadline:
                raise Slow("no answer in time")
        return channel.answer(TRANSFER_S)

    def _given_up(self, key: _Key, op: str, why: ChannelTimeout, timeout: float) -> TargetTimeout:
        first = self._quarantine_s if isinstance(why, _Stuck) else min(SHORT_QUARANTINE_S, self._quarantine_s)
        if key[0]:
            self._quarantines.add(*key, op, first)
        if isinstance(why, Blocked):
            return TargetTimeout(
                f"process {key[0]} does not let itself be read ({op})",
                hint="its memory may lie on storage, or behind a handler, that does not answer",
            )
        return TargetTimeout(f"process {key[0]} could not be read in {timeout:g} s ({op})")


def _request(op: str, key: _Key, ask: Ask) -> dict[str, Any]:
    return {"op": op, "pid": key[0], "start_ns": key[1], **ask()}
