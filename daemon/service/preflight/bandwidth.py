"""Measures the bandwidth of one gRPC connection to a peer's daemon, and receives the bytes that peers send to measure
it. Both are off by default.

The path between two services is measured. This distinguishes a link of 1 Gb/s from a link of 10 Gb/s; at higher rates
the services are the limit. One measurement runs at a time, limited in bytes and time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from probing.api.errors import Overloaded, PrivilegeError, ProbingError, QueryError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.service.outgoing import Outgoing
from probing.diagnosis.preflight.facts import Transfer

__all__ = ("Bandwidth",)

CHUNK = 512 << 10
# The timeout of the measurement of one peer, and the pause after a measurement, s.
PEER_S = 3.0
PAUSE_S = 2.0
_OFF = "cluster.bandwidth_test_bytes is not set"
_BUSY = "another measurement runs here"


class Bandwidth:
    """Sends and receives bytes. ``most``: the maximum size of one transfer, bytes; 0: transfers are disabled. Belongs
    to one event loop.
    """

    def __init__(self, most: int, outgoing: Outgoing | None = None) -> None:
        self._most = most
        self._outgoing = outgoing or Outgoing()
        self._sending = self._taking = False
        self._ended = -PAUSE_S

    async def transfers(self, peers: Sequence[str], seconds: float) -> tuple[Transfer, ...]:
        """Sends to each of ``peers`` (HOST:PORT) in turn, all within ``seconds``. Raises PrivilegeError, Overloaded."""
        if not self._most:
            raise PrivilegeError(_OFF, hint="set it in the configuration of the nodes")
        if self._sending or time.monotonic() < self._ended + PAUSE_S:
            raise Overloaded(_BUSY)
        self._sending = True
        limit = time.monotonic() + seconds
        try:
            return tuple([await self._transfer(peer, min(limit - time.monotonic(), PEER_S)) for peer in peers])
        finally:
            self._sending = False
            self._ended = time.monotonic()

    async def take(self, requests: AsyncIterator[Any]) -> int:
        """Receives the bytes of a peer. Returns their number. Raises PrivilegeError, Overloaded, and QueryError above
        the limit.
        """
        if not self._most:
            raise PrivilegeError(_OFF, hint="set it in the configuration of this node")
        if self._taking:
            raise Overloaded(_BUSY)
        self._taking = True
        try:
            return await asyncio.wait_for(self._taken(requests), PEER_S)
        except asyncio.TimeoutError:
            raise _too_much() from None
        finally:
            self._taking = False

    async def _taken(self, requests: AsyncIterator[Any]) -> int:
        taken = 0
        async for request in requests:
            taken += len(request.data)
            if taken > self._most:
                raise _too_much()
        return taken

    async def _transfer(self, peer: str, seconds: float) -> Transfer:
        if seconds <= 0:
            return Transfer(peer, why="there was no time left")
        try:
            channel, metadata = await self._outgoing.channel(peer), self._outgoing.metadata(peer)
        except ProbingError as e:
            return Transfer(peer, why=e.message)
        begun, sent = time.perf_counter_ns(), 0
        # Bytes are sent for 60 % of the time, so a slow link sends fewer bytes. The rest of the time is for the answer.
        until = time.monotonic() + 0.6 * seconds
        chunk = pb.SinkRequest(data=bytes(CHUNK))

        async def chunks() -> AsyncIterator[pb.SinkRequest]:
            nonlocal sent
            while sent + CHUNK <= self._most and time.monotonic() < until:
                yield chunk
                sent += CHUNK

        async with channel:
            stub: Any = NodeStub(channel)
            try:
                reply = await asyncio.wait_for(stub.Sink(chunks(), metadata=metadata), seconds)
            except grpc.aio.AioRpcError as e:
                return Transfer(peer, why=str(e.details() or e.code().name)[:200])
            except asyncio.TimeoutError:
                return Transfer(peer, why=f"no answer within {seconds:.1f} s")
        return Transfer(peer, reply.received_bytes, time.perf_counter_ns() - begun)


def _too_much() -> QueryError:
    return QueryError("the measurement sent too many bytes, or took too long")
