"""Sends requests to parser processes, each with a deadline. A collector has a pool of parsers for each kind of file.

The symbols of a file are parsed once and cached.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from probing.api.errors import InternalError, ProbingError, TargetTimeout, UnsupportedTarget
from probing.api.typed import typed, typed_json
from probing.daemon.elf.symbols import FileSymbols, Symbol, SymbolFinder
from probing.daemon.ipc import ChannelClosed, ChannelTimeout, Header, Message
from probing.daemon.pool import TRANSFER_S, Policy, Pool, Process

__all__ = ("ParserPool", "ParserPools", "answer_of", "symbols_by")

PARSERS = Policy("parser")
FILES_IDLE_S = 30.0
PARSE_TIMEOUT_S = 5.0
MAX_CACHED_FILES, MAX_CACHED_SYMBOLS = 256, 8_192
# The seconds for which a refusal is cached. It must expire, because a file that could not be parsed may be parsed later
# although its size and mtime, the key of the cache, are the same.
REFUSED_S = 300.0
_T = TypeVar("_T")


class _Symbols(TypedDict):
    found: FileSymbols


class _Refusal(NamedTuple):
    """The cached error for a file without symbols, valid until the time.monotonic() ``until``."""

    error: UnsupportedTarget
    until: float


class ParserPool:
    """Parses files in unprivileged parser processes, which ``socket_path`` starts. Thread-safe."""

    def __init__(self, socket_path: str, policy: Policy = PARSERS) -> None:
        self._pool = Pool(socket_path, policy)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], FileSymbols | _Refusal] = OrderedDict()

    def close(self) -> None:
        self._pool.close()

    def symbols(self, fd: int, patterns: Sequence[str], timeout: float = 10.0) -> FileSymbols:
        """Returns the symbols of the ELF file ``fd`` whose names match ``patterns``.

        The caller keeps ``fd``. Answers and, for REFUSED_S, refusals are cached by (device, inode, size, mtime). Raises
        UnsupportedTarget for a file that is malformed or exceeds a limit, TargetTimeout if no answer comes in time.
        """
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, tuple(patterns))
        with self._lock:
            answer = self._known.get(key)
            if answer is not None:
                self._known.move_to_end(key)
        if answer is None or (isinstance(answer, _Refusal) and time.monotonic() >= answer.until):
            answer = self._parsed(key, fd, patterns, timeout)
        if isinstance(answer, _Refusal):
            raise UnsupportedTarget(answer.error.message, hint=answer.error.hint)
        return answer

    def _parsed(self, key: tuple[Any, ...], fd: int, patterns: Sequence[str], timeout: float) -> FileSymbols | _Refusal:
        answer: FileSymbols | _Refusal
        try:
            header = self.call("symbols", fds=[fd], timeout=timeout, patterns=list(patterns))
            answer = answer_of(_Symbols, header)["found"]
        except UnsupportedTarget as e:
            answer = _Refusal(e, time.monotonic() + REFUSED_S)
        with self._lock:
            self._known[key] = answer
            while len(self._known) > MAX_CACHED_FILES or self._symbols() > MAX_CACHED_SYMBOLS:
                self._known.popitem(last=False)
        return answer

    def _symbols(self) -> int:
        return sum(len(known.symbols) for known in self._known.values() if isinstance(known, FileSymbols))

    def call(
        self, op: str, payload: bytes = b"", *, fds: Sequence[int] = (), timeout: float = 10.0, **args: Any
    ) -> Header:
        """Sends a request to a parser (``confined/parser.py`` lists the ops) and returns the JSON object in the answer.

        ``timeout`` in seconds includes the wait for a free parser; the caller keeps ``fds``. Raises TargetTimeout when
        the parser does not answer in time or ends, UnsupportedTarget or CorruptTarget for a file that cannot be parsed.
        """
        deadline = time.monotonic() + timeout
        header = {"op": op, **args}
        try:
            answer = self._ask(header, payload, fds, deadline)
        except ChannelClosed:
            # A parser can be killed at any time, even while idle, so the request is sent again. If two parsers end on
            # the same file, the file is the reason.
            try:
                answer = self._ask(header, payload, fds, deadline)
            except ChannelClosed as e:
                raise TargetTimeout(
                    "the parser process ended while it read a file", hint="the file may take more memory than allowed"
                ) from e
        answer.close_fds()
        try:
            return typed_json(Header, answer.payload)
        except ValueError as e:
            raise InternalError("a parser's answer is not a JSON object") from e

    def _ask(self, header: Header, payload: bytes, fds: Sequence[int], deadline: float) -> Message:
        parser = self._pool.acquire(deadline)
        channel = parser.channel
        done: Callable[[Process], None] = self._pool.discard
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
            raise TargetTimeout("a file could not be parsed in time", hint="check that it is a valid library") from e
        except ChannelClosed:
            raise
        except ProbingError:
            done = self._pool.release
            raise
        finally:
            done(parser)
        return answer


class ParserPools:
    """The parsers at ``socket_path``, in three pools: a file that keeps a parser busy delays only files of its kind.

    ``libraries`` is for files that get probes, ``stacks`` for files of a process whose stack was requested, ``files``
    for dumps and reports that a job writes, and for debugging information, which takes long to parse.
    """

    def __init__(self, socket_path: str) -> None:
        self.libraries = ParserPool(socket_path)
        self.stacks = ParserPool(socket_path, PARSERS._replace(kept=0))
        self.files = ParserPool(socket_path, PARSERS._replace(kept=0, idle_s=FILES_IDLE_S))

    def close(self) -> None:
        for pool in (self.libraries, self.stacks, self.files):
            pool.close()


def symbols_by(parsers: ParserPool) -> SymbolFinder:
    """Returns a function that takes the descriptor of an ELF file and patterns, and returns the symbols that match."""

    def find(fd: int, patterns: Sequence[str]) -> Sequence[Symbol]:
        return parsers.symbols(fd, patterns, PARSE_TIMEOUT_S).symbols

    return find


def answer_of(kind: type[_T], answer: Header) -> _T:
    """Returns the answer of a parser, checked and converted to ``kind``. Raises InternalError."""
    try:
        return typed(kind, answer)
    except ValueError as e:
        raise InternalError(f"a parser's answer makes no sense: {e}") from e
