"""The readers and parsers of this daemon: a few warm processes, each asked one thing at a time, given up when stuck.

Connecting to ``reader.sock`` or ``parser.sock`` starts a fresh process there (inetd-like), and closing the connection
ends it. So a process that does not answer in time costs one connection: it is closed, a new one is made in the
background, and its target is left alone for a while.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from probing.api.errors import InternalError, ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message, connect
from probing.daemon.processes.ask_many import Ask, Blocked, ask_round
from probing.daemon.processes.progress import Progress

__all__ = ("ParserPool", "Quarantine", "ReaderPool")

QUARANTINE_S = 30.0
# A target that is stuck again and again is tried less and less often.
MAX_QUARANTINE_S = 480.0
# The first one of a target that somebody waits for impatiently: it may only have been swapped out.
SHORT_QUARANTINE_S = 2.0
MAX_QUARANTINED = 4_096
# What a fresh process may take until it answers, on a machine that is busy.
START_TIMEOUT_S = 20.0
RETRY_S = 0.5
MAX_CACHED_FILES, MAX_CACHED_SYMBOLS = 256, 8_192
_log = logging.getLogger(__name__)
_Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A target that is left alone. ``since`` and ``until`` are CLOCK_MONOTONIC s; ``times``: how often in a row."""

    pid: int
    start_ns: int
    op: str
    since: float
    until: float
    times: int


class _Pool:
    """``size`` warm connections. Safe for any thread; a thread in the background keeps the number up.

    With ``idle_s`` they are made when somebody waits for one, and end after so many seconds without use.
    """

    def __init__(self, path: str, size: int, name: str, idle_s: float | None = None) -> None:
        self._path = path
        self._size = size
        self._name = name
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._waiting = 0
        self._used = 0.0
        self._idle: list[Channel] = []
        self._live = 0
        self._pids: WeakKeyDictionary[Channel, int] = WeakKeyDictionary()
        self._closed = False
        self._failure: ProbingError | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End all processes; calls that still run fail with ChannelClosed when they come back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for channel in idle:
            channel.close()
        self._keeper.join(START_TIMEOUT_S)

    def acquire(self, deadline: float) -> Channel:
        """An idle connection. Raises TargetTimeout when none becomes free, or why none can be made."""
        with self._changed:
            self._waiting += 1
            if self._idle_s is not None:
                self._changed.notify_all()
            try:
                while not self._idle:
                    if self._closed:
                        raise InternalError(f"the {self._name}s are closed")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._none_free()
                    self._changed.wait(left)
                return self._idle.pop()
            finally:
                self._waiting -= 1

    def try_acquire(self) -> Channel | None:
        """An idle connection, if there is one now that nobody waits for."""
        with self._changed:
            return self._idle.pop() if self._idle and not self._closed else None

    def release(self, channel: Channel) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(channel)
                self._used = time.monotonic()
                # All: the keeper waits for the same condition, and would swallow a single wake-up.
                self._changed.notify_all()
                return
        channel.close()

    def discard(self, channel: Channel) -> None:
        """Close the connection, and so end the process at the other end; another one takes its place."""
        channel.close()
        with self._changed:
            self._live -= 1
            self._changed.notify_all()

    def _none_free(self) -> ProbingError:
        if self._failure is not None and not self._live:
            return InternalError(f"no {self._name} can be had: {self._failure.message}", hint=self._failure.hint)
        return TargetTimeout(f"no {self._name} was free in time", hint="other processes are slow to read; ask again")

    def _keep(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._closed or self._lacks_one(), self._idle_s):
                    self._end_idle()
                    continue
                if self._closed:
                    return
                self._live += 1
            try:
                self.release(self._fresh())
                self._failure = None
            except ProbingError as e:
                if self._failure is None:
                    _log.warning("no %s can be started: %s", self._name, e.message)
                self._failure = e
                with self._changed:
                    self._live -= 1
                    self._changed.wait_for(lambda: self._closed, RETRY_S)

    def _lacks_one(self) -> bool:
        return self._live < self._size and (self._idle_s is None or self._waiting > len(self._idle))

    def _end_idle(self) -> None:
        if self._idle_s is not None and time.monotonic() - self._used >= self._idle_s:
            while self._idle:
                self._idle.pop().close()
                self._live -= 1

    def pid_of(self, channel: Channel) -> int:
        """The process at the other end; 0 where it did not say."""
        return self._pids.get(channel, 0)

    def _fresh(self) -> Channel:
        channel = connect(self._path)
        try:
            answer = channel.request({"op": "ping"}, timeout=START_TIMEOUT_S)
            self._pids[channel] = int(answer.header.get("pid", 0))
        except BaseException:
            channel.close()
            raise
        return channel


class ReaderPool:
    """Reads targets through reader processes at ``socket_path``; ``size`` of them at once. Safe for any thread."""

    def __init__(self, socket_path: str, size: int = 3, *, quarantine_s: float = QUARANTINE_S) -> None:
        self.size = size
        self._pool = _Pool(socket_path, size, "reader")
        self._quarantine_s = quarantine_s
        self._lock = threading.Lock()
        self._left_alone: OrderedDict[_Key, Quarantine] = OrderedDict()

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
        """Ask a reader (``daemon/confined/reader.py`` lists the ops). The caller owns the descriptors of the answer.

        ``timeout`` in seconds covers waiting for a reader too. A reader that is blocked, not only slow, is given up
        after ``patience`` seconds already. ``pid`` 0 is for requests about many processes. Raises ProcessGone,
        TargetTimeout (also at once, while the target is left alone), another TargetError, PrivilegeError, or
        InternalError when there are no readers.
        """
        deadline = time.monotonic() + timeout
        self._refuse_quarantined(pid, start_ns)
        header = {"op": op, "pid": pid, "start_ns": start_ns, **args}
        try:
            answer = self._ask(header, deadline, patience)
        except ChannelTimeout as e:
            raise self._given_up((pid, start_ns), op, e, timeout) from e
        self._has_answered((pid, start_ns))
        return answer

    def call_each(
        self, op: str, asks: Mapping[_Key, Ask], *, timeout: float, patience: float
    ) -> Iterator[tuple[_Key, Message | ProbingError]]:
        """``call`` for many processes (pid, start_ns) at once: each with its answer or what ``call`` would raise.

        ``asks`` give the further arguments, when a reader is free for them. In the order in which answers come.
        """
        deadline = time.monotonic() + timeout
        free: dict[_Key, Ask] = {}
        for key, ask in asks.items():
            try:
                self._refuse_quarantined(*key)
            except TargetTimeout as e:
                yield key, e
            else:
                free[key] = partial(_request, op, key, ask)
        for key, answer in ask_round(self._pool, free, deadline, patience):
            if isinstance(answer, ChannelTimeout):
                yield key, self._given_up(key, op, answer, timeout)
            else:
                self._has_answered(key)
                yield key, answer

    def quarantined(self) -> list[Quarantine]:
        """The targets that are left alone now."""
        now = time.monotonic()
        with self._lock:
            return [q for q in self._left_alone.values() if q.until > now]

    def forget(self, pid: int, start_ns: int) -> None:
        """The process ended."""
        with self._lock:
            self._left_alone.pop((pid, start_ns), None)

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

    def _request(
        self, channel: Channel, header: dict[str, Any], deadline: float, patience: float | None
    ) -> Message:
        if patience is None:
            return channel.request(header, timeout=max(0.001, deadline - time.monotonic()))
        channel.send(header)
        readable = select.poll()
        readable.register(channel.fileno(), select.POLLIN)
        progress = Progress(self._pool.pid_of(channel))
        # Two looks, so that one is over when the patience is.
        while not readable.poll(patience * 500):
            if progress.none_since_last():
                raise Blocked("a reader is blocked")
            if time.monotonic() > deadline:
                raise ChannelTimeout("no answer in time")
        return channel.answer(max(0.001, deadline - time.monotonic()))

    def _refuse_quarantined(self, pid: int, start_ns: int) -> None:
        with self._lock:
            held = self._left_alone.get((pid, start_ns)) if pid else None
        if held is not None and held.until > time.monotonic():
            raise TargetTimeout(f"process {pid} is left alone since a read of it did not end ({held.op})")

    def _given_up(self, key: _Key, op: str, why: ChannelTimeout, timeout: float) -> TargetTimeout:
        if isinstance(why, Blocked):
            self._leave_alone(*key, op, min(SHORT_QUARANTINE_S, self._quarantine_s))
            return TargetTimeout(
                f"process {key[0]} does not let itself be read ({op})",
                hint="its memory may lie on storage, or behind a handler, that does not answer",
            )
        if key[0]:
            self._leave_alone(*key, op, self._quarantine_s)
        return TargetTimeout(f"process {key[0]} could not be read in {timeout:g} s ({op})")

    def _has_answered(self, key: _Key) -> None:
        if self._left_alone:
            with self._lock:
                self._left_alone.pop(key, None)

    def _leave_alone(self, pid: int, start_ns: int, op: str, first_s: float) -> None:
        now = time.monotonic()
        with self._lock:
            before = self._left_alone.pop((pid, start_ns), None)
            times = before.times + 1 if before else 1
            span = min(first_s * 2 ** (times - 1), MAX_QUARANTINE_S)
            self._left_alone[pid, start_ns] = Quarantine(pid, start_ns, op, now, now + span, times)
            while len(self._left_alone) > MAX_QUARANTINED:
                self._left_alone.popitem(last=False)
        _log.warning("process %d does not let itself be read (%s): left alone for %g s", pid, op, span)


class ParserPool:
    """Has files parsed by processes without rights at ``socket_path``. Safe for any thread.

    ``size`` of them are kept warm; with ``idle_s`` they are started for a file, and end after so many seconds.
    """

    def __init__(self, socket_path: str, size: int = 1, *, idle_s: float | None = None) -> None:
        self._pool = _Pool(socket_path, size, "parser", idle_s)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], dict[str, Any] | UnsupportedTarget] = OrderedDict()

    def close(self) -> None:
        self._pool.close()

    def symbols(self, fd: int, patterns: Sequence[str], timeout: float = 10.0) -> dict[str, Any]:
        """The symbols of the ELF file ``fd`` whose names match ``patterns``; ``confined/parser.py`` has the keys.

        ``fd`` stays the caller's. Answers, refusals too, are kept by (device, inode, size, mtime). Raises
        UnsupportedTarget for a file that makes no sense or asks for too much, TargetTimeout for no answer in time.
        """
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, tuple(patterns))
        with self._lock:
            answer = self._known.get(key)
            if answer is not None:
                self._known.move_to_end(key)
        if answer is None:
            answer = self._parsed(key, fd, patterns, timeout)
        if isinstance(answer, UnsupportedTarget):
            raise UnsupportedTarget(answer.message, hint=answer.hint)
        return answer

    def _parsed(
        self, key: tuple[Any, ...], fd: int, patterns: Sequence[str], timeout: float
    ) -> dict[str, Any] | UnsupportedTarget:
        answer: dict[str, Any] | UnsupportedTarget
        try:
            answer = self.call("symbols", fds=[fd], timeout=timeout, patterns=list(patterns))
        except UnsupportedTarget as e:
            answer = e
        with self._lock:
            self._known[key] = answer
            while len(self._known) > MAX_CACHED_FILES or self._symbols() > MAX_CACHED_SYMBOLS:
                self._known.popitem(last=False)
        return answer

    def _symbols(self) -> int:
        return sum(len(known["symbols"]) for known in self._known.values() if isinstance(known, dict))

    def nccl_layout(self, fd: int, known: Sequence[str], timeout: float = 15.0) -> dict[str, Any]:
        """The layouts of the libnccl open at ``fd``, which stays the caller's; keys in ``nccl_uprobes.dwarf_layout``.

        A build whose id (hex) is ``known`` is not looked into. Raises as ``symbols`` does.
        """
        return self.call("nccl_layout", fds=[fd], timeout=timeout, known=list(known))

    def call(
        self, op: str, payload: bytes = b"", *, fds: Sequence[int] = (), timeout: float = 10.0, **args: Any
    ) -> dict[str, Any]:
        """Ask a parser (``daemon/confined/parser.py`` lists the ops) whose answer is a JSON object.

        ``timeout`` in seconds covers waiting for a parser too; ``fds`` stay the caller's. Raises TargetTimeout when the
        parser does not answer in time or ends, UnsupportedTarget or CorruptTarget for what makes no sense.
        """
        deadline = time.monotonic() + timeout
        header = {"op": op, **args}
        try:
            answer = self._ask(header, payload, fds, deadline)
        except ChannelClosed:
            # It can be killed at any time, also while it waited. A file that ends two of them is the reason itself.
            try:
                answer = self._ask(header, payload, fds, deadline)
            except ChannelClosed as e:
                raise TargetTimeout(
                    "the parser ended over a file", hint="the file asks for more than a parser may use"
                ) from e
        answer.close_fds()
        with contextlib.suppress(ValueError):
            parsed = json.loads(answer.payload)
            if isinstance(parsed, dict):
                return parsed
        raise InternalError("a parser answered no object")

    def _ask(self, header: dict[str, Any], payload: bytes, fds: Sequence[int], deadline: float) -> Message:
        channel = self._pool.acquire(deadline)
        done: Callable[[Channel], None] = self._pool.discard
        try:
            answer = channel.request(header, payload, timeout=max(0.001, deadline - time.monotonic()), fds=fds)
            done = self._pool.release
        except ChannelTimeout as e:
            raise TargetTimeout("a file could not be parsed in time", hint="is it a library at all?") from e
        except ChannelClosed:
            raise
        except ProbingError:
            done = self._pool.release
            raise
        finally:
            done(channel)
        return answer


def _request(op: str, key: _Key, ask: Ask) -> dict[str, Any]:
    return {"op": op, "pid": key[0], "start_ns": key[1], **ask()}
