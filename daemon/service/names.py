"""Looks up host names in separate threads, so that a resolver that does not answer delays no other work.

asyncio has few default threads, and records, votes and findings need them. A look-up in a thread cannot be cancelled.
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
    """Returns the entries of getaddrinfo(3) for TCP. Raises OSError, also for a text that is not a host name."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError:
        # The codec of host names raises UnicodeError for an empty or overlong label between two dots.
        raise socket.gaierror(socket.EAI_NONAME, "the text is not a host name") from None


class Names:
    """Looks up at most ``threads`` names at the same time; further names wait."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="names")

    async def run(self, function: Callable[[], _T]) -> _T:
        """Runs ``function``, which looks up names, in one of the threads and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def entries(self, host: str, port: int | None) -> list[Entry]:
        """Returns the result of ``entries_of``, which is called in one of the threads. Raises OSError."""
        return await self.run(partial(entries_of, host, port))


OF_NODES, OF_CALLERS = Names(8), Names(8)
"""OF_NODES looks up names that the daemon needs to reach other nodes, OF_CALLERS names that callers ask about."""
