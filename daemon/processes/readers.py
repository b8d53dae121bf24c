"""Interfaces of the pools that read processes and parse files (``reader_pool`` and ``parsers``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from probing.api.errors import ProbingError
from probing.daemon.ipc import Message

__all__ = ("Parsers", "Readers")

# A ``ProcessKey``, or any other pair (pid, start_ns).
_Target = tuple[int, int]


class Readers(Protocol):
    """The methods of ``processes.reader_pool.ReaderPool``, which documents them."""

    size: int

    def call(
        self,
        op: str,
        *,
        pid: int = 0,
        start_ns: int = 0,
        timeout: float = 2.0,
        patience: float | None = None,
        **args: Any,
    ) -> Message: ...

    def call_each(
        self,
        op: str,
        asks: Mapping[_Target, Callable[[], dict[str, Any]]],
        *,
        timeout: float,
        patience: float,
    ) -> Iterable[tuple[_Target, Message | ProbingError]]: ...

    def forget(self, pid: int, start_ns: int) -> None: ...


class Parsers(Protocol):
    """The methods of ``processes.parsers.ParserPool``, which documents them."""

    def call(
        self, op: str, payload: bytes = b"", *, fds: Sequence[int] = (), timeout: float = 10.0, **args: Any
    ) -> dict[str, Any]: ...

    def symbols(self, fd: int, patterns: Sequence[str], timeout: float = 10.0) -> dict[str, Any]: ...
