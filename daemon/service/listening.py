"""The TCP ports for gRPC and HTTP. The supervisor hands their sockets over, or this process binds them, with retries
until the ports are free.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.ipc import Channel
from probing.daemon.supervisor.notify import FdStore
from probing.daemon.supervisor.ports import PORTS_FD, RETRY_S, bind, problem_of, resolved

__all__ = ("Listeners", "TcpPort")

# After the first byte of a message, the rest must arrive within this time, s.
_RECEIVE_S = 1.0
_log = logging.getLogger(__name__)


class Listeners:
    """Passes listening sockets to the ports of this process. Belongs to one event loop.

    ``kept``: whether the supervisor binds the sockets and hands them over, now or later.
    """

    def __init__(self, channel: Channel | None = None, store: FdStore | None = None) -> None:
        self.store = store or FdStore()
        self._channel = channel
        self._ports: dict[str, TcpPort] = {}

    @classmethod
    def inherited(cls) -> Listeners:
        """Returns the listeners that were handed over by the supervisor, which started this process, or by systemd."""
        number = os.environ.pop(PORTS_FD, "")
        if not number.isdigit():
            return cls()
        os.set_inheritable(int(number), False)
        return cls(Channel(socket.socket(fileno=int(number))))

    @property
    def kept(self) -> bool:
        return self._channel is not None

    def start(self) -> None:
        """Passes the sockets on as they arrive. All ports must have been added before."""
        if self._channel is not None:
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)
        self.store.drop_others(self._ports)

    def add(self, name: str, port: TcpPort) -> None:
        self._ports[name] = port

    def stop(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            message = self._channel.receive(_RECEIVE_S)
        except ProbingError:
            # The supervisor is gone, and this process will end with it: no more sockets arrive.
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            return
        port = self._ports.get(str(message.header.get("port")))
        if port and message.fds:
            port.given(socket.socket(fileno=message.take_fd()))
        elif port:
            port.fails(str(message.header.get("problem")))
        message.close_fds()


class TcpPort:
    """A port that listens on ``address`` (HOST:PORT) and passes the socket to ``serve``. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        address: str,
        serve: Callable[[socket.socket], Awaitable[None]],
        listeners: Listeners | None = None,
    ) -> None:
        """Makes the port. ``name``: the name of its source in Status."""
        self._name = name
        self._address = address
        self._serve = serve
        self._listeners = listeners or Listeners()
        self._task: asyncio.Task[None] | None = None
        self._problem = ""

    async def start(self) -> None:
        """Waits for the supervisor's socket if ``kept``. Otherwise listens now, or tries again every RETRY_S."""
        self._listeners.add(self._name, self)
        if not self._listeners.kept and not await self._listen():
            self._task = asyncio.create_task(self._try())

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def given(self, listener: socket.socket) -> None:
        """Serves ``listener``, which the supervisor also keeps open."""
        listener.setblocking(False)
        self._problem = ""
        self._task = asyncio.create_task(self._serve_given(listener))

    def fails(self, problem: str) -> None:
        """Stores ``problem``, the reason why the supervisor could not bind the port, for Status."""
        self._problem = problem

    def sources(self) -> list[pb.Source]:
        """Returns the state of the port for Status if it is degraded."""
        if not self._problem:
            return []
        return [pb.Source(name=self._name, state="degraded", reason=self._problem)]

    async def _serve_given(self, listener: socket.socket) -> None:
        await self._serve(listener)

    async def _try(self) -> None:
        while not await self._listen():
            await asyncio.sleep(RETRY_S)
        _log.warning("listening on %s now", self._address)

    async def _listen(self) -> bool:
        try:
            family, address = await asyncio.to_thread(resolved, self._address)
            store = self._listeners.store
            if (listener := store.take(self._name, family, address)) is None:
                listener = bind(family, address)
                store.keep(self._name, listener)
        except OSError as e:
            problem = problem_of(self._address, e)
            if problem != self._problem:
                _log.error("%s", problem)
            self._problem = problem
            return False
        await self._serve(listener)
        self._problem = ""
        return True
