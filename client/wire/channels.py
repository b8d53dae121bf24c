"""Open channels to many nodes, as many as the process may have; those used last stay."""

from __future__ import annotations

import resource
from collections import OrderedDict
from itertools import islice
from typing import Any

import grpc
import grpc.aio

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.wire.connection import OPTIONS, checked, route_of, target_of
from probing.client.wire.tls import Tls, credentials_of

__all__ = ("Channel", "Channels")

_MOST = 2048
# File descriptors that are left to the rest of the process.
_SPARE = 256
# A second channel to a node gets a connection of its own.
_APART = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class Channel:
    """A channel to one node, with the stub of its service."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, clear_token: str = "") -> None:
        self._route = route_of(address, clear_token)
        target = self._route.target if self._route else target_of(address)
        if credentials is None or address.startswith("unix:"):
            self._channel = grpc.aio.insecure_channel(target, options=_APART)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_APART)
        self.users = 0
        # The generated stub has no types.
        self.stub: Any = NodeStub(self._channel)

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def problem(self) -> ProbingError | None:
        """Why the node was not shown the token; None: it was, or does not answer."""
        return self._route.problem if self._route else None

    async def close(self) -> None:
        await self._channel.close()
        if self._route:
            self._route.close()


class Channels:
    """Belongs to one event loop."""

    def __init__(self, token: str, tls: Tls | None) -> None:
        """Raises UsageError for files of ``tls`` that cannot be used."""
        self._credentials = None if tls is None else credentials_of(tls)
        self._clear_token = token if tls is None else ""
        self._kept: OrderedDict[str, Channel] = OrderedDict()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A proven route takes three descriptors more.
        self._most = max(32, min(_MOST, (soft - _SPARE) // (5 if self._clear_token else 2)))

    def open(self, address: str) -> Channel:
        """Returns a channel that its user closes. Raises UsageError as ``Connection`` does."""
        return Channel(checked(address, self._clear_token), self._credentials, self._clear_token)

    def take(self, address: str) -> Channel:
        """Returns the channel that is kept for ``address``; ``give_back`` ends the use."""
        channel = self._kept.get(address)
        if channel is None:
            channel = self._kept[address] = self.open(address)
        self._kept.move_to_end(address)
        channel.users += 1
        return channel

    def connected(self, address: str) -> bool:
        channel = self._kept.get(address)
        return channel is not None and channel.connected

    async def give_back(self, channel: Channel) -> None:
        """Closes what was not used for longest, where too many are open."""
        channel.users -= 1
        surplus = len(self._kept) - self._most
        idle = islice((address for address, kept in self._kept.items() if not kept.users), max(surplus, 0))
        for address in list(idle):
            await self._kept.pop(address).close()

    async def close(self) -> None:
        while self._kept:
            await self._kept.popitem()[1].close()
