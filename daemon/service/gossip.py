"""Gossip over gRPC: an asyncio task that ticks the membership and calls peers, and the answers to theirs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from probing.api.errors import Overloaded, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.cluster import Membership
from probing.daemon.cluster.messages import Call, Message
from probing.daemon.service.gossip_wire import message_of, packed
from probing.daemon.service.outgoing import Outgoing
from probing.daemon.source_state import SourceState, first_of

__all__ = ("Gossip",)

# Connections to peers: those to watched nodes are used at each heartbeat and stay, others go after so many of them.
MAX_CHANNELS = 64
IDLE_BEATS = 2.5
MAX_CALLS = 64
MAX_RELAYS = 16
# Between two look-ups of seeds that are names of several nodes, s.
RESOLVE_S = 30.0
MAX_RESOLVED = 4096
COMPRESS_BYTES = 200
DNS = "dns:"
_log = logging.getLogger(__name__)


class Gossip:
    """``seeds``: addresses, or ``dns:NAME:PORT`` for all addresses of a name. ``local``: peers may be Unix sockets.

    ``outgoing`` opens connections to peers. Belongs to one event loop.
    """

    def __init__(
        self,
        membership: Membership,
        seeds: Sequence[str] = (),
        *,
        local: bool = False,
        outgoing: Outgoing | None = None,
    ) -> None:
        self._membership = membership
        self._seeds = tuple(seeds)
        self._local = local
        self._outgoing = outgoing or Outgoing()
        # By address: when it was used last, in the order of that.
        self._channels: OrderedDict[tuple[str, int], tuple[float, grpc.aio.Channel, Any]] = OrderedDict()
        self._calls: set[asyncio.Task[bool]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._relays = 0
        self._unresolved: dict[str, str] = {}
        self._skipped = 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._beat())]
        if any(seed.startswith(DNS) for seed in self._seeds):
            self._tasks.append(asyncio.create_task(self._resolve()))
        else:
            self._membership.set_seeds(self._seeds)

    async def stop(self) -> None:
        for task in (*self._tasks, *self._calls):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)
        for _, channel, _ in self._channels.values():
            await channel.close()

    async def answer(self, sent: pb.GossipMessage) -> pb.GossipMessage:
        """Returns the answer to the message of a peer. Raises PeerError, Overloaded."""
        message = message_of(sent, local=self._local)
        reached = False
        call = self._membership.relay(message.relay) if message.relay else None
        if call is not None:
            if self._relays >= MAX_RELAYS:
                raise Overloaded(f"{MAX_RELAYS} pings for other nodes are under way")
            self._relays += 1
            try:
                reached = await self._call(call, call.seconds / 2)
            finally:
                self._relays -= 1
        return packed(self._membership.answer(message, reached=reached))

    def sources(self) -> list[SourceState]:
        """Returns the row of gossip in ``status`` and ``probing.sources``; none for a node alone."""
        members = [member for member in self._membership.members() if member.name]
        problems = [*self._membership.problems(), *(f"{name}: {why}" for name, why in self._unresolved.items())]
        if len(members) < 2 and not problems:
            return []
        live = sum(m.state in ("healthy", "recovering") for m in members)
        detail = f"{live} of {len(members)} nodes are healthy"
        if self._skipped:
            detail += f", {self._skipped} pings were not sent since too many were under way"
        return [SourceState("cluster", "degraded" if problems else "running", first_of(problems), detail=detail)]

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._make(self._membership.tick())
            await self._close_idle()
            # Not in a burst after a pause.
            due = max(due + self._membership.heartbeat_s, loop.time())
            await asyncio.sleep(due - loop.time())

    def _make(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if len(self._calls) >= MAX_CALLS:
                self._skipped += 1
                continue
            task = asyncio.create_task(self._call(call, call.seconds))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call(self, call: Call, seconds: float) -> bool:
        """Makes ``call`` and those that follow. Returns whether the node answered that it is about."""
        try:
            message = await self._exchange(call.address, call.message, seconds)
        except (grpc.aio.AioRpcError, asyncio.TimeoutError, ProbingError) as e:
            _log.debug("%s at %s does not answer: %s", call.name, call.address, e)
            self._make(self._membership.unanswered(call))
            return False
        self._make(self._membership.answered(call, message))
        return message.sender.name == call.name

    async def _exchange(self, address: str, message: Message, seconds: float) -> Message:
        stub = self._stub(address)
        request = pb.GossipRequest(message=packed(message))
        compression = grpc.Compression.Gzip if request.ByteSize() > COMPRESS_BYTES else None
        metadata = self._outgoing.metadata(address) or None
        reply = await asyncio.wait_for(
            stub.Gossip(request, timeout=seconds, metadata=metadata, compression=compression), seconds
        )
        return message_of(reply.message, local=self._local)

    def _stub(self, address: str) -> Any:
        now = asyncio.get_running_loop().time()
        key = self._outgoing.key(address)
        if key in self._channels:
            _, channel, stub = self._channels.pop(key)
        else:
            channel = self._outgoing.channel(address)
            stub = NodeStub(channel)
        self._channels[key] = now, channel, stub
        return stub

    async def _close_idle(self) -> None:
        oldest = asyncio.get_running_loop().time() - IDLE_BEATS * self._membership.heartbeat_s
        for key, (used, channel, _) in list(self._channels.items()):
            if used < oldest or len(self._channels) > MAX_CHANNELS:
                del self._channels[key]
                await channel.close()

    async def _resolve(self) -> None:
        while True:
            found: dict[str, None] = {}
            for seed in self._seeds:
                addresses = await self._addresses(seed) if seed.startswith(DNS) else [seed]
                found.update(dict.fromkeys(addresses))
            self._membership.set_seeds(list(found)[:MAX_RESOLVED])
            await asyncio.sleep(RESOLVE_S)

    async def _addresses(self, seed: str) -> list[str]:
        host, _, port = seed.removeprefix(DNS).rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as e:
            self._unresolved[seed] = f"the name is not known: {e.strerror or e}"[:200]
            return []
        self._unresolved.pop(seed, None)
        hosts = [str(info[4][0]) for info in infos]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
