"""One listener for all addresses of 127.0.0.0/8, which shows gRPC the node that a connection was meant for.

gRPC does not report the address that a caller connected to. So each connection goes on to gRPC's inner socket from an
abstract address that names the node, which gRPC reports as the peer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct

from simulator.cast import Cast

__all__ = ("Relay", "number_of")

_PREFIX = "probing-simulator"
_serial = itertools.count()


def number_of(peer: str) -> int:
    """Returns the number of the node that the gRPC ``peer`` wants."""
    return int(peer.rpartition(":")[2].rpartition("-")[2])


class Relay:
    """Belongs to one event loop."""

    def __init__(self, cast: Cast, inner: str, process: int) -> None:
        self._cast = cast
        self._port = cast.port + process
        self._inner = inner
        self._held: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> socket.socket:
        """Returns the listener; connections may come at once."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", self._port))
        listener.listen(4096)
        listener.setblocking(False)
        return listener

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                front, _ = await loop.sock_accept(listener)
                task = loop.create_task(self._join(front))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _join(self, front: socket.socket) -> None:
        host = front.getsockname()[0]
        number = self._cast.number(host)
        if not 0 <= number < self._cast.count or self._cast.refuses(number):
            # A reset, as of a port that nobody listens on.
            front.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            front.close()
            return
        if self._cast.dead(number):
            self._held.add(front)
            return
        front.setblocking(False)
        front.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        back = socket.socket(socket.AF_UNIX)
        back.setblocking(False)
        back.bind(f"\0{_PREFIX}-{os.getpid()}-{next(_serial)}-{number}")
        await loop.sock_connect(back, self._inner)
        one = _Side()
        await loop.create_connection(lambda: one, sock=back)
        await loop.create_connection(lambda: _Side(one), sock=front)


class _Side(asyncio.Protocol):
    """Writes what it reads to the other side."""

    transport: asyncio.Transport

    def __init__(self, other: _Side | None = None) -> None:
        self.other = other
        self._early: list[bytes] = []
        if other is not None:
            other.other = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.other is not None:
            for data in self.other._early:
                transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None or not hasattr(self.other, "transport"):
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and hasattr(self.other, "transport"):
            self.other.transport.close()
