"""Looks host names up in threads of their own: a resolver that does not answer must not keep other work waiting.

The threads of asyncio, which records, votes and findings need, are few, and a look-up in one of them cannot be ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = ("OF_CALLERS", "OF_NODES", "Names", "entries_of")

_T = TypeVar("_T")
Entry = tuple[Any, Any, int, str, tuple[Any, ...]]


def entries_of(host: str, port: int | None) -> list[Entry]:
    """Returns the entries of getaddrinfo(3) for TCP. Raises OSError, also for a text that is no name of a host."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError:
        # The codec of names refuses empty and long labels by a UnicodeError.
        raise socket.gaierror(socket.EAI_NONAME, "the text is no name of a host") from None


class Names:
    """Looks up as many names at the same time as there are ``threads``; more names wait."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="names")

    async def run(self, function: Callable[[], _T]) -> _T:
        """Returns the result of ``function``, which looks names up, from one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def entries(self, host: str, port: int | None) -> list[Entry]:
        """Returns ``entries_of`` a host. Raises OSError."""
        return await self.run(partial(entries_of, host, port))


OF_NODES, OF_CALLERS = Names(8), Names(8)
"""For names that the daemon needs to reach other nodes, and for names that callers want to know about."""
