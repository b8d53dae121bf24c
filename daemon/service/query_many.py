"""Answers QueryMany: sends a query to many peers for a caller that cannot reach thousands at once, and relays the
answers.

Each peer gets the authorization that the caller shows for that peer, and neither this node's token nor its certificate.
So no caller can read rows through this node that the peers would refuse, and this node learns nothing by which it could
ask other nodes. Peers get a plain Query, so they do not send it to further nodes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from probing.api.errors import (
    BROKEN,
    ConfigError,
    NotFound,
    Overloaded,
    PeerError,
    PrivilegeError,
    ProbingError,
    UsageError,
)
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.api.wire import MAX_PEERS, parts_of, reported_error, shown
from probing.daemon.service.errors import to_proto
from probing.daemon.service.limits import Context, Limits, seconds_for
from probing.daemon.service.outgoing import Outgoing
from probing.federation.execution.asking import Policy, ask_many

__all__ = ("QueryMany",)

# The maximum size of the answers that are held for one caller, bytes.
MAX_HELD = 64 << 20
MAX_KEPT = 256
PIECE_BYTES = 1 << 20
# The longest pause between two replies to the caller, s.
SIGN_S = 0.5
# The time that is left for sending the answers back to the caller, s.
MARGIN_S = 0.2
# The status of a call whose connection broke, or that the peer's gRPC did not accept because it had too many calls.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_POLICY = Policy(at_once=64, most=MAX_PEERS, hedge_after=10, grace_s=0.1)


class QueryMany:
    """Answers QueryMany. Belongs to one event loop."""

    def __init__(self, outgoing: Outgoing, limits: Limits, *, kept: int = MAX_KEPT) -> None:
        """``kept``: the maximum number of channels to peers that stay open. gRPC closes their connections when they are
        idle.
        """
        self._outgoing = outgoing
        self._limits = limits
        self._channels = _Channels(outgoing, kept)

    async def answer(self, request: pb.QueryManyRequest, context: Context, known: Collection[str]) -> None:
        """Writes the answers of the peers; ``known`` are their addresses. Raises UsageError."""
        addresses = tuple(dict.fromkeys(request.addresses))
        if not 0 < len(addresses) <= MAX_PEERS:
            raise UsageError(f"the request names {len(addresses)} nodes", hint=f"name 1 to {MAX_PEERS} addresses")
        authorization = next((v for key, v in context.invocation_metadata() or () if key == "authorization"), "")
        seconds = seconds_for(context, request.query.timeout_ms, self._limits.query_s, self._limits.query_s)
        writer = _Writer(context, self._limits.unread_s)
        asked = [address for address in addresses if address in known]
        for address in set(addresses).difference(asked):
            await writer.failed(address, NotFound(f"{address} is not a peer of this node"))
        token = authorization if isinstance(authorization, str) else ""
        if request.shown and len(request.shown) != len(request.addresses):
            raise UsageError("``shown`` and ``addresses`` must have the same length")
        tokens = dict(zip(request.addresses, request.shown, strict=True)) if request.shown else {}
        question = _Question(self._outgoing, self._channels, request.query, (token, tokens), writer)
        signs = asyncio.create_task(writer.signs())
        try:
            found = await ask_many(
                asked, question.ask, max(seconds - MARGIN_S, 0.05), _POLICY, alive=self._channels.connected
            )
        finally:
            signs.cancel()
        for failed in found.failed:
            await writer.failed(failed.address, failed.error)


class _Channels:
    """The most recently used channels to peers. They are kept because closing a channel is slow: gRPC looks through all
    tasks of the loop.
    """

    def __init__(self, outgoing: Outgoing, most: int) -> None:
        self._outgoing = outgoing
        self._most = most
        self._kept: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def connected(self, address: str) -> bool:
        channel = self._kept.get(address)
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def take(self, address: str) -> grpc.aio.Channel:
        """Returns a channel. Raises PeerError if this node has lost its certificate, or the address is not allowed."""
        channel = self._kept.get(address)
        if channel is None:
            try:
                opened = await self._outgoing.channel(address, anonymous=True)
            except ConfigError as e:
                raise PeerError(e.message, hint=e.hint) from None
            # Another caller may have opened a channel meanwhile.
            channel = self._kept.setdefault(address, opened)
        self._kept.move_to_end(address)
        while len(self._kept) > self._most:
            # Calls that use a channel keep a reference to it; when they have ended, it is closed by garbage collection.
            self._kept.popitem(last=False)
        return channel


class _Writer:
    """Writes replies one at a time, and the answer of each peer once."""

    def __init__(self, context: Context, unread_s: float) -> None:
        self._context = context
        self._unread_s = unread_s
        self._turn = asyncio.Lock()
        self._done: set[str] = set()

    async def signs(self) -> None:
        # If the caller is gone, or reads nothing, writing the answers reports the error.
        with suppress(grpc.aio.InternalError, asyncio.TimeoutError):
            while True:
                await asyncio.sleep(SIGN_S)
                await self._write(pb.QueryManyReply())

    async def answered(self, address: str, parts: list[pb.QueryReply]) -> None:
        if address in self._done:
            return
        self._done.add(address)
        reply, size = pb.QueryManyReply(address=address), 0
        for part in parts:
            if size > PIECE_BYTES:
                await self._write(reply)
                reply, size = pb.QueryManyReply(address=address), 0
            reply.parts.append(part)
            size += part.ByteSize()
        reply.done = True
        await self._write(reply)

    async def failed(self, address: str, error: ProbingError) -> None:
        if address not in self._done:
            self._done.add(address)
            await self._write(pb.QueryManyReply(address=address, done=True, error=to_proto(error)))

    async def _write(self, reply: pb.QueryManyReply) -> None:
        async with self._turn:
            try:
                await asyncio.wait_for(self._context.write(reply), self._unread_s)
            except grpc.aio.UsageError as e:
                raise grpc.aio.InternalError("the caller is gone") from e


class _Question:
    """One query of a caller to peers. ``authorizations``: the header for all peers, and headers for single peers by
    address.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        channels: _Channels,
        query: pb.QueryRequest,
        authorizations: tuple[str, Mapping[str, str]],
        writer: _Writer,
    ) -> None:
        self._outgoing = outgoing
        self._channels = channels
        self._query = query
        self._authorizations = authorizations
        self._writer = writer
        self._held = 0

    async def ask(self, address: str, seconds: float, attempt: int) -> tuple[str, None]:
        del attempt
        query = pb.QueryRequest(
            sql=self._query.sql,
            statements=self._query.statements,
            timeout_ms=max(1, int(seconds * 1000)),
            max_bytes=min(self._query.max_bytes or MAX_HELD, MAX_HELD),
            whole=True,
        )
        common, single = self._authorizations
        authorization = single.get(address) or common
        if authorization.startswith(shown("")) and not self._outgoing.vouches(address):
            raise PrivilegeError(f"the name of {address} is not proven to this node, so your token is not sent there")
        metadata = self._outgoing.passed_on(address, authorization)
        held: list[int] = []
        channel = await self._channels.take(address)
        call: Any = NodeStub(channel).Query(query, timeout=seconds + 0.1, metadata=metadata)
        try:
            parts = [part async for reply in call if self._holds(reply, held) for part in parts_of(reply)]
            await self._writer.answered(address, parts)
        except grpc.RpcError as e:
            raise _error_of(address, e) from None
        finally:
            call.cancel()
            self._held -= sum(held)
        # Two addresses may belong to one node, so the caller compares the names of nodes.
        return address, None

    def _holds(self, reply: pb.QueryReply, held: list[int]) -> bool:
        held.append(reply.ByteSize())
        self._held += held[-1]
        if self._held > MAX_HELD:
            raise Overloaded("the answers are too large to be passed on", hint="ask the node itself")
        return True


def _error_of(address: str, error: Any) -> ProbingError:
    if (sent := reported_error(error)) is not None:
        return sent
    code, details = error.code(), " ".join(str(error.details() or "").split())[:200]
    # gRPC has the same status for a call that broke and for a node that cannot be reached.
    unconnected = details.startswith("failed to connect")
    if unconnected:
        details = "connection refused" if "refused" in details else "no connection in time"
    reason = details or code.name.lower()
    broken = BROKEN if code in _BROKEN and not unconnected else ""
    return PeerError(f"{address} does not answer: {reason}", code=broken, reason=reason)
