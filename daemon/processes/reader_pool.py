"""Sends requests to reader processes, each with a deadline. A target whose read did not end is put in quarantine.

``call_each`` reads many processes at once from a single thread, and a slow or failed read delays no other read. It uses
no thread for each process, because waiting for a thread to be scheduled would take longer than the read. ``ask_each``
uses threads, for processes that need several requests each.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from probing.api.errors import CorruptTarget, InternalError, ProbingError, TargetTimeout
from probing.api.typed import typed_json
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Header, Message
from probing.daemon.pool import TRANSFER_S, Policy, Pool, Process
from probing.daemon.processes.procfs import parse_stat
from probing.daemon.processes.quarantine import Quarantine, Quarantines

__all__ = ("GRACE_S", "PATIENCE_S", "Failure", "ReaderPool", "ask_each", "payload_of", "seconds_left")

QUARANTINE_S = 30.0
# The seconds of the first quarantine of a target if the caller set a ``patience`` or the reader was not blocked. It is
# short, because the target may only have been swapped out, or the machine may be busy.
SHORT_QUARANTINE_S = 2.0
# The interval at which a reader that has not answered in time is checked for progress, s.
_LOOK_S = 0.1
# A reader that runs, or waits for a CPU, may take this many further timeouts: starting a new reader would take longer.
_EXTRA = 2
_MAX_STAT = 4096
# The seconds after the deadline in which a reader's answer may still be transferred.
_MARGIN_S = 0.05
# A usual ``patience``, s. A reader takes about 1 ms for a process, and a blocked reader must not delay other requests.
PATIENCE_S = 0.04
# A reader itself stops at the deadline. If it does not, it is given up this many seconds later, and its target is
# quarantined.
GRACE_S = 1.0
_HINT = "ask for fewer processes, or wait longer"
_Key = tuple[int, int]
_Row = TypeVar("_Row")
_T = TypeVar("_T")
_Ask = Callable[[], Header]


class _Blocked(ChannelTimeout):
    """Raised when a reader neither runs nor waits for a CPU. ``patient``: the caller set a ``patience``, which has
    elapsed.
    """

    def __init__(self, *, patient: bool) -> None:
        super().__init__("a reader is blocked")
        self.patient = patient


class ReaderPool:
    """Reads targets through up to ``size`` reader processes, which ``socket_path`` starts. Thread-safe."""

    def __init__(self, socket_path: str, size: int = 3, *, quarantine_s: float = QUARANTINE_S) -> None:
        self.size = size
        self._pool = Pool(socket_path, Policy("reader", size))
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
        """Sends a request to a reader (``confined/reader.py`` lists the ops). The caller owns the answer's descriptors.

        ``timeout`` in seconds includes the wait for a free reader. A blocked reader is given up after ``patience``
        seconds. Without a patience, a reader that is slow, but not blocked, gets three times the timeout. ``pid`` is 0
        in requests about many processes. Raises ProcessGone, TargetTimeout (at once while the target is in
        quarantine), another TargetError, PrivilegeError, or InternalError if no reader can be started.
        """
        ((_, answer),) = self._round(op, {(pid, start_ns): lambda: args}, timeout, patience)
        if isinstance(answer, ProbingError):
            raise answer
        return answer

    def call_each(
        self, op: str, asks: Mapping[_Key, _Ask], *, timeout: float, patience: float
    ) -> Iterator[tuple[_Key, Message | ProbingError]]:
        """Makes ``call`` for many processes at once. Yields each process (pid, start_ns) with its answer or error.

        Each function in ``asks`` returns the further arguments of a request. It is called when a reader is free.
        Answers come in the order of their arrival.
        """
        return self._round(op, asks, timeout, patience)

    def quarantined(self) -> list[Quarantine]:
        """Returns the targets that are in quarantine now."""
        return self._quarantines.current()

    def quarantine_s(self, pid: int, start_ns: int) -> float:
        """Returns the seconds until the end of a target's quarantine; 0 if the target is not in quarantine."""
        return self._quarantines.seconds_left(pid, start_ns)

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the quarantine of a process that ended."""
        self._quarantines.end(pid, start_ns)

    def _round(
        self, op: str, asks: Mapping[_Key, _Ask], timeout: float, patience: float | None
    ) -> Iterator[tuple[_Key, Message | ProbingError]]:
        deadline = time.monotonic() + timeout
        free: dict[_Key, _Ask] = {}
        for key, ask in asks.items():
            try:
                self._quarantines.refuse(*key)
                free[key] = ask
            except TargetTimeout as e:
                yield key, e
        for key, answer in _Round(self._pool, op, free, deadline, patience):
            if isinstance(answer, ChannelTimeout):
                yield key, self._given_up(key, op, answer, timeout)
            else:
                if isinstance(answer, Message):
                    self._quarantines.end(*key)
                elif isinstance(answer, ChannelClosed) and key[0]:
                    # Two readers ended while they read this process. Without a quarantine, more readers would end.
                    self._quarantines.add(*key, op, min(SHORT_QUARANTINE_S, self._quarantine_s))
                yield key, answer

    def _given_up(self, key: _Key, op: str, why: ChannelTimeout, timeout: float) -> TargetTimeout:
        patient = isinstance(why, _Blocked) and why.patient
        stuck = isinstance(why, _Blocked) and not patient
        if key[0]:
            first = self._quarantine_s if stuck else min(SHORT_QUARANTINE_S, self._quarantine_s)
            self._quarantines.add(*key, op, first)
        if patient:
            return TargetTimeout(
                f"the read of process {key[0]} is blocked ({op})",
                hint="its memory may be on storage, or behind a page-fault handler, that does not answer",
            )
        return TargetTimeout(f"process {key[0]} could not be read in {timeout:g} s ({op})")


@dataclass(slots=True)
class _Asked:
    """A request in flight. ``look``: the time of the next check whether the reader makes progress. ``last``: the time
    after which the request is given up even if the reader runs. Both are times of time.monotonic(). ``again``: this is
    the second try.
    """

    key: _Key
    reader: Process
    again: bool
    progress: _Progress
    look: float
    last: float


class _Round:
    """One call of ``call_each``: yields each process once with its answer or error, in the order of arrival.

    ``deadline`` is a time of time.monotonic(). The error is _Blocked if a reader is blocked for ``patience`` seconds
    or, without a patience, still blocked after the deadline.
    """

    def __init__(self, pool: Pool, op: str, asks: Mapping[_Key, _Ask], deadline: float, patience: float | None) -> None:
        self._pool = pool
        self._op = op
        self._asks = asks
        self._waiting = deque((key, False) for key in asks)
        self._deadline = deadline
        self._patient = patience is not None
        # A reader is checked twice within the patience. If it has not run between the checks, it is blocked.
        self._look_s = _LOOK_S if patience is None else patience / 2
        self._busy: dict[int, _Asked] = {}
        self._readable = select.poll()

    def __iter__(self) -> Iterator[tuple[_Key, Message | ProbingError]]:
        try:
            while self._waiting or self._busy:
                yield from self._send()
                yield from self._receive()
        finally:
            for asked in self._busy.values():
                self._pool.discard(asked.reader)

    def _send(self) -> Iterator[tuple[_Key, ProbingError]]:
        while self._waiting:
            try:
                reader = self._pool.try_acquire() if self._busy else self._pool.acquire(self._deadline)
            except ProbingError as e:
                yield from ((key, e) for key, _ in self._waiting)
                self._waiting.clear()
                return
            if reader is None:
                return
            key, again = self._waiting.popleft()
            now = time.monotonic()
            look, last = now + self._look_s, self._deadline
            if not self._patient:
                look, last = self._deadline, self._deadline + _EXTRA * max(0.0, self._deadline - now)
            asked = _Asked(key, reader, again, _Progress(reader.pid), look, last)
            self._busy[reader.channel.fileno()] = asked
            try:
                reader.channel.send({"op": self._op, "pid": key[0], "start_ns": key[1], **self._asks[key]()})
                self._readable.register(reader.channel.fileno(), select.POLLIN)
            except ProbingError as e:
                del self._busy[reader.channel.fileno()]
                if error := self._failed(asked, e):
                    yield key, error

    def _receive(self) -> Iterator[tuple[_Key, Message | ProbingError]]:
        if not self._busy:
            return
        look_s = min(asked.look for asked in self._busy.values()) - time.monotonic()
        for fd, _ in self._readable.poll(max(0.0, look_s) * 1000):
            asked = self._forget(fd)
            try:
                answer = asked.reader.channel.answer(TRANSFER_S)
            except ProbingError as e:
                if error := self._failed(asked, e):
                    yield asked.key, error
            else:
                self._pool.release(asked.reader)
                yield asked.key, answer
        yield from self._give_up()

    def _give_up(self) -> Iterator[tuple[_Key, ProbingError]]:
        now = time.monotonic()
        for fd, asked in list(self._busy.items()):
            if now < asked.look:
                continue
            asked.look = now + self._look_s
            if asked.progress.none_since_last():
                self._pool.discard(self._forget(fd).reader)
                yield asked.key, _Blocked(patient=self._patient)
            elif now > asked.last:
                self._pool.finish(self._forget(fd).reader)
                yield asked.key, ChannelTimeout("no answer in time")

    def _failed(self, asked: _Asked, error: ProbingError) -> ProbingError | None:
        """Returns the error to yield, or None if the request is sent again: a reader can be killed at any time."""
        if not isinstance(error, (ChannelClosed, ChannelTimeout)):
            self._pool.release(asked.reader)
            return error
        self._pool.discard(asked.reader)
        if isinstance(error, ChannelClosed) and not asked.again:
            self._waiting.append((asked.key, True))
            return None
        return error

    def _forget(self, fd: int) -> _Asked:
        self._readable.unregister(fd)
        return self._busy.pop(fd)


class _Progress:
    """Checks whether the reader ``pid`` makes progress while it works on a request."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._before: int | None = None

    def none_since_last(self) -> bool:
        """Returns whether the reader is blocked and has not run since the last call."""
        ran = self._ran_if_blocked()
        stuck = ran is not None and ran == self._before
        self._before = ran
        return stuck

    def _ran_if_blocked(self) -> int | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stat = parse_stat(os.read(fd, _MAX_STAT))
            finally:
                os.close(fd)
            switches = self._switches()
        except (OSError, CorruptTarget):
            return None
        return switches if stat.state in "DS" else None

    def _switches(self) -> int:
        # The number of times that the reader was scheduled. Unlike its CPU time, which is counted in ticks, this number
        # changes at each run.
        return int(self._path.with_name("schedstat").read_text().split()[2])


class Failure(NamedTuple):
    """A process that could not be read, and why."""

    pid: int
    start_ns: int
    error: ProbingError


def ask_each(
    pool: Executor, targets: Iterable[_Key], ask: Callable[[int, int], list[_Row]], deadline: float, what: str
) -> tuple[list[_Row], list[Failure]]:
    """Calls ``ask(pid, start_ns)`` for each target in the threads of ``pool``. Returns all rows, and the targets that
    failed.

    ``deadline`` is a time of time.monotonic(); ``what`` names the rows in the message of a timeout.
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
    """Returns the seconds until ``deadline`` (time.monotonic()). Raises TargetTimeout after the deadline."""
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


def payload_of(kind: type[_T], answer: Message) -> _T:
    """Returns the JSON payload of a reader's answer, converted to ``kind``. Raises InternalError if it does not fit."""
    try:
        return typed_json(kind, answer.payload)
    except ValueError as e:
        raise InternalError(f"a reader's answer makes no sense: {e}") from e
