"""Keeps connections to the daemons of other nodes while they are used."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.service.outgoing import Metadata, Outgoing

__all__ = ("PeerStubs",)

# Those to watched nodes are used at each heartbeat and stay.
MAX_CHANNELS = 64
IDLE_S = 10.0


@dataclass(slots=True, eq=False)
class _Peer:
    """``users``: calls in flight; ``used``: when the last one ended, by the clock of the event loop."""

    channel: grpc.aio.Channel
    stub: Any
    users: int = 0
    used: float = 0.0


class PeerStubs:
    """Stubs by address (unix:PATH or HOST:PORT). Belongs to one event loop."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._broken: list[_Peer] = []
        # By ``Outgoing.key``, which changes with the certificate of this node. The one that was used last is the last.
        self._peers: OrderedDict[tuple[str, str, int], _Peer] = OrderedDict()

    @asynccontextmanager
    async def use(self, address: str, node: str = "") -> AsyncIterator[Any]:
        """A context with the stub of the daemon at ``address``; ``node``: as ``Outgoing.channel`` checks it.

        Raises ConfigError if a certificate of this node is gone, and PeerError for an address that is not allowed.
        """
        key = self._outgoing.key(address, node)
        if key not in self._peers:
            channel = await self._outgoing.channel(address, node=node)
            # Another call may have opened it meanwhile.
            self._peers.setdefault(key, _Peer(channel, NodeStub(channel)))
        peer = self._peers[key]
        self._peers.move_to_end(key)
        peer.users += 1
        try:
            yield peer.stub
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.UNAVAILABLE and self._peers.get(key) is peer:
                # Its name may have another address by now.
                del self._peers[key]
                self._broken.append(peer)
            raise
        finally:
            peer.users -= 1
            peer.used = asyncio.get_running_loop().time()

    @property
    def outgoing(self) -> Outgoing:
        return self._outgoing

    def metadata(self, address: str, node: str = "") -> Metadata | None:
        """Returns the metadata that a call to ``address`` needs; ``node``: as in ``use``."""
        return self._outgoing.metadata(address, node) or None

    async def close_idle(self) -> None:
        """Closes connections that nobody uses: those for IDLE_S, and the oldest beyond MAX_CHANNELS."""
        self._broken, broken = [], self._broken
        for peer in broken:
            if peer.users:
                self._broken.append(peer)
            else:
                await peer.channel.close()
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for key, peer in list(self._peers.items()):
            if not peer.users and (peer.used < oldest or len(self._peers) > MAX_CHANNELS):
                del self._peers[key]
                await peer.channel.close()

    async def close(self) -> None:
        for peer in (*self._peers.values(), *self._broken):
            await peer.channel.close()
        self._peers.clear()
        self._broken.clear()
