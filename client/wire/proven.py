"""Passes gRPC's connections on to a loopback port, once the kernel has said who listens there.

gRPC connects by itself, also again in the middle of a stream of calls, and then sends the token with the next call. So
it connects to a socket of this process instead, and each connection is proven before a byte of it is passed on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any

from probing.api.errors import PrivilegeError, ProbingError
from probing.client.wire import loop
from probing.client.wire.listeners import listeners, require_proven

__all__ = ("ProvenRoute",)

_CREDENTIALS = struct.Struct("3i")
_PIECE = 256 << 10
# A daemon that starts between two looks takes another look.
_ATTEMPTS = 3
_BACKLOG = 16


class ProvenRoute:
    """A way to ``address`` (HOST:PORT of loopback). gRPC connects to ``target``.

    ``problem``: why the last connection was not passed on; None: it was, or nobody listens.
    """

    def __init__(self, address: str) -> None:
        self.problem: ProbingError | None = None
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        name = f"probingctl-{secrets.token_hex(16)}"
        self.target = f"unix-abstract:{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._serving = loop.submit(self._serve())
        self._serving.add_done_callback(lambda _: self._listener.close())

    def close(self) -> None:
        """Ends all connections. The channel must have been closed: nobody else may get its target."""
        self._serving.cancel()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        running = asyncio.get_running_loop()
        try:
            while True:
                near, _ = await running.sock_accept(self._listener)
                task = running.create_task(self._pass_on(near))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _pass_on(self, near: socket.socket) -> None:
        with near:
            if _CREDENTIALS.unpack(near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] != os.getpid():
                return
            try:
                far = await self._connected()
            except ProbingError as e:
                self.problem = e
                return
            except OSError:
                # Whoever asked finds out why by connecting once more.
                self.problem = None
                return
            self.problem = None
            with far:
                await _joined(near, far)

    async def _connected(self) -> socket.socket:
        """Returns a proven connection. Raises OSError where nobody listens, PrivilegeError where somebody else does."""
        running = asyncio.get_running_loop()
        infos = await running.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        error: OSError | PrivilegeError = ConnectionRefusedError()
        # A name has an address of each family, and each can have a listener of its own.
        for family, _, _, _, address in infos:
            try:
                return await self._to(family, address)
            except PrivilegeError as e:
                error = e
            except OSError as e:
                error = error if isinstance(error, PrivilegeError) else e
        raise error

    async def _to(self, family: int, address: Any) -> socket.socket:
        running = asyncio.get_running_loop()
        for _ in range(_ATTEMPTS):
            far = socket.socket(family, socket.SOCK_STREAM)
            try:
                far.setblocking(False)
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                before = listeners(str(address[0]), self._port)
                await running.sock_connect(far, address)
                if require_proven(self._address, before, listeners(str(address[0]), self._port)):
                    return far
            except BaseException:
                far.close()
                raise
            far.close()
        what = f"{self._address} changes hands: who listens there is not known"
        raise PrivilegeError(f"{what}; the token was not sent", hint="ask again in a moment")


async def _joined(near: socket.socket, far: socket.socket) -> None:
    """Passes bytes on in both directions until both have ended, or one is broken."""
    near.setblocking(False)
    ways = [asyncio.ensure_future(_passed(*way)) for way in ((near, far), (far, near))]
    try:
        await asyncio.gather(*ways)
    except OSError:
        # gRPC sees the end of its connection.
        return
    finally:
        for way in ways:
            way.cancel()


async def _passed(source: socket.socket, target: socket.socket) -> None:
    running = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_PIECE))
    while count := await running.sock_recv_into(source, buffer):
        await running.sock_sendall(target, buffer[:count])
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
