"""Reaches the other nodes of a job for its coordinator: finds them in the membership, and calls their daemons."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc.aio

from probing.api.errors import NotFound, PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster import Membership
from probing.daemon.diagnose.coordination.peers import (
    LIVING,
    MAX_ADDRESSES,
    Holder,
    PeerFacts,
    Sight,
    job_mark,
    plain_address,
)
from probing.daemon.service.names import OF_NODES
from probing.daemon.service.outgoing import PeerStubs

__all__ = ("JobPeers",)

MAX_FACTS = 32 << 20
# The maximum number of addresses of a host's name that are used.
MAX_HOSTS = 8
# The time that is left for a call after its gRPC deadline, s. So a call without an answer fails by the gRPC deadline,
# an error after which PeerStubs opens a new connection.
_MARGIN_S = 0.1
_Reply = TypeVar("_Reply")
# Makes a call with (stub, address, options of the call).
_Ask = Callable[[Any, str, Mapping[str, Any]], Awaitable[_Reply]]


class JobPeers:
    """Implements ``coordination.peers.Peers``. ``loop``: the event loop that makes the calls."""

    def __init__(self, membership: Membership, stubs: PeerStubs, loop: asyncio.AbstractEventLoop) -> None:
        self._node = membership.name
        self._membership = membership
        self._stubs = stubs
        self._loop = loop

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        living, over = (job_mark(job, run, living=bool(LIVING & alive)) for alive in (1, 0))
        return [
            Holder(
                member.name,
                living in member.jobs,
                member.state == "failed",
                plain_address(member.address.rpartition(":")[0]),
            )
            for member in self._membership.members()
            if member.name != self._node and (living in member.jobs or over in member.jobs)
        ]

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        self._membership.set_jobs(sorted(job_mark(job, run, living=living) for (job, run), living in runs.items()))

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        request = pb.FactsRequest(job=job, run=run, shallow=not deep, timeout_ms=round(timeout * 1000))
        return self._begin(node, lambda stub, _, options: _facts(node, stub, request, options), timeout)

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        request = pb.FactsRequest(job=job, run=run, shallow=True, connections=True, timeout_ms=round(timeout * 1000))

        async def ask(stub: Any, address: str, options: Mapping[str, Any]) -> Sight:
            shown = await _sight(node, stub, request, options)
            return shown._replace(hosts=await _hosts(address))

        return self._begin(node, ask, timeout)

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        own = [{name: value for name, value in row.items() if name not in ("node", "ts")} for row in rows]
        request = pb.RecordRequest(findings=json.dumps(own, separators=(",", ":")).encode())

        async def ask(stub: Any, _: str, options: Mapping[str, Any]) -> None:
            await stub.Record(request, **options)

        return self._begin(node, ask, timeout)

    def _begin(self, node: str, ask: _Ask[_Reply], timeout: float) -> Future[_Reply]:
        return asyncio.run_coroutine_threadsafe(self._answer(node, ask, timeout), self._loop)

    async def _answer(self, node: str, ask: _Ask[_Reply], timeout: float) -> _Reply:
        """Makes a call and returns its answer. Raises PeerError and NotFound."""
        address = self._membership.address_of(node)
        if not address:
            raise PeerError(f"node {node} is not known")

        async def call() -> _Reply:
            async with self._stubs.use(address) as stub:
                return await ask(stub, address, {"timeout": timeout, "metadata": self._stubs.metadata(address)})

        try:
            return await asyncio.wait_for(call(), timeout + _MARGIN_S)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(f"node {node}: {str(e.details())[:200]}") from None
            raise PeerError(f"node {node} does not answer: {str(e.details() or e.code().name)[:200]}") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise PeerError(f"node {node} does not answer: no answer within {timeout:.1f} s") from None


async def _facts(node: str, stub: Any, request: pb.FactsRequest, options: Mapping[str, Any]) -> PeerFacts:
    """Returns the facts that ``node`` sends. Raises PeerError for facts that are too large or that come from another
    node.
    """
    parts: list[bytes] = []
    sent = time.time_ns()
    offset, error = 0, 1 << 62
    async for reply in stub.Facts(request, **options):
        if reply.node != node:
            raise PeerError(f"{node} answers as {reply.node[:100]}", hint="give every daemon its own --node-name")
        if reply.received_ns and error == 1 << 62:
            # The peer got the request at some time between our two times.
            got = time.time_ns()
            offset, error = reply.received_ns - (sent + got) // 2, (got - sent) // 2
        parts += reply.facts
        if sum(map(len, parts)) > MAX_FACTS:
            raise PeerError(f"node {node} sends more than {MAX_FACTS} bytes of facts")
    return PeerFacts(parts, offset, 0 if error == 1 << 62 else error)


async def _sight(node: str, stub: Any, request: pb.FactsRequest, options: Mapping[str, Any]) -> Sight:
    """Returns the Sight of ``node``. Raises PeerError if another node answers. Facts in the reply of an older version
    are not read.
    """
    async for reply in stub.Facts(request, **options):
        if reply.node != node:
            raise PeerError(f"{node} answers as {reply.node[:100]}", hint="give every daemon its own --node-name")
        if reply.addresses or reply.peers:
            return Sight(_plain(reply.addresses), _plain(reply.peers))
        if reply.facts:
            break
    return Sight()


def _plain(addresses: Sequence[str]) -> frozenset[str]:
    return frozenset(plain_address(one) for one in addresses[:MAX_ADDRESSES]) - {""}


async def _hosts(address: str) -> frozenset[str]:
    """Returns the IP addresses of HOST:PORT; empty for a Unix socket, and for a name that cannot be resolved."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        return frozenset()
    if known := plain_address(host):
        return frozenset((known,))
    try:
        entries = await OF_NODES.entries(host.strip("[]"), int(port))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(plain_address(str(entry[4][0])) for entry in entries[:MAX_HOSTS]) - {""}
