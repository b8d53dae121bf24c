"""Binds TCP ports for gRPC and HTTP; one that is taken is tried again until it is free."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = ("TcpPort", "bind")

# Time between attempts to bind a port that is taken, s.
RETRY_S = 5.0
BACKLOG = 128
# Seconds without a byte until the first probe, seconds between probes, and their number.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
_log = logging.getLogger(__name__)


class TcpPort:
    """Listens on ``address`` (HOST:PORT) and hands the socket to ``serve``. Belongs to one event loop."""

    def __init__(self, name: str, address: str, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        """``name``: that of the source in Status."""
        self._name = name
        self._address = address
        self._serve = serve
        self._trying: asyncio.Task[None] | None = None
        self._problem = ""

    async def start(self) -> None:
        """Listens, or goes on trying every RETRY_S."""
        if not await self._listen():
            self._trying = asyncio.create_task(self._try())

    def stop(self) -> None:
        if self._trying:
            self._trying.cancel()

    def sources(self) -> list[pb.Source]:
        """Returns its state for Status, if it is degraded."""
        if not self._problem:
            return []
        return [pb.Source(name=self._name, state="degraded", reason=self._problem)]

    async def _try(self) -> None:
        while not await self._listen():
            await asyncio.sleep(RETRY_S)
        _log.warning("listening on %s now", self._address)

    async def _listen(self) -> bool:
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listener = bind(family, address)
        except OSError as e:
            problem = f"cannot listen on {self._address}: {e.strerror or e}; it is tried again every {RETRY_S:.0f} s"
            if problem != self._problem:
                _log.error("%s", problem)
            self._problem = problem
            return False
        await self._serve(listener)
        self._problem = ""
        return True


def bind(family: int, address: Any) -> socket.socket:
    """Returns a listening socket that does not block. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Its connections inherit them: one whose other end is gone gives its place back after two minutes.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
