"""Requests to parser processes, with a deadline each. Symbols of a file are parsed once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from probing.api.errors import InternalError, ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.ipc import Channel, ChannelClosed, ChannelTimeout, Message
from probing.daemon.processes.connections import IDLE_S, TRANSFER_S, Connections

__all__ = ("ParserPool",)

MAX_CACHED_FILES, MAX_CACHED_SYMBOLS = 256, 8_192


class ParserPool:
    """Parses files in processes without rights at ``socket_path``. Safe for any thread.

    Of ``size`` parsers ``kept`` wait for files all the time. The others start for a file, and end after ``idle_s``
    seconds without use.
    """

    def __init__(self, socket_path: str, size: int = 1, *, kept: int = 1, idle_s: float = IDLE_S) -> None:
        self._pool = Connections(socket_path, size, "parser", kept=kept, idle_s=idle_s)
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

    def call(
        self, op: str, payload: bytes = b"", *, fds: Sequence[int] = (), timeout: float = 10.0, **args: Any
    ) -> dict[str, Any]:
        """Send a request to a parser (``confined/parser.py`` lists the ops) and return the JSON object of its answer.

        ``timeout`` in seconds includes the wait for a free parser; ``fds`` stay the caller's. Raises TargetTimeout when
        the parser does not answer in time or ends, UnsupportedTarget or CorruptTarget for a file that cannot be parsed.
        """
        deadline = time.monotonic() + timeout
        header = {"op": op, **args}
        try:
            answer = self._ask(header, payload, fds, deadline)
        except ChannelClosed:
            # A parser can be killed at any time, even while idle. A file that ends two parsers is the reason itself.
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
            channel.send(header, payload, fds)
            readable = select.poll()
            readable.register(channel.fileno(), select.POLLIN)
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                done = self._pool.finish
                raise ChannelTimeout("no answer in time")
            answer = channel.answer(TRANSFER_S)
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
