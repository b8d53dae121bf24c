"""Asks thousands of nodes by way of some of them: each of those asks up to 128 others and passes their answers on.

An answer counts once it is whole. What a node in the middle did not pass on, because it died, fell silent or refused,
is asked for directly, so that no row is lost or comes twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from probing.api.errors import PeerError, ProbingError, error_from
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_PEERS
from probing.client.wire.channels import Channels
from probing.client.wire.credentials import Credentials
from probing.client.wire.errors import error_of
from probing.federation.execution.asking import Ask, Policy, ask_many
from probing.federation.execution.fanout import Failed, Gathered

__all__ = ("TREE_FROM", "Group", "ask_tree", "groups_of")

T = TypeVar("T")
# Fewer nodes are asked directly.
TREE_FROM = 2048
# Nodes in the middle that are asked at once, and their share of the time.
_AT_ONCE = 32
_SHARE = 0.8
# They may say nothing for so long, s, or for this share of their time. They send a sign each half second.
_SILENCE_S = 3.0
_SILENCE = 0.25
# Errors of the way by a node in the middle: the node itself may answer us.
_DIRECTLY = frozenset(("NotFound", "Overloaded", "PrivilegeError", "Unauthenticated", "UsageError"))
Group = tuple[str, tuple[str, ...]]
# Reads the messages of one node, asked at a time (wall clock, ns); returns its name and answer, or raises ProbingError.
Read = Callable[[str, list[pb.QueryReply], int], tuple[str, T]]


def groups_of(addresses: Sequence[str]) -> list[Group]:
    """Returns the nodes in the middle, spread evenly, each with those that it asks."""
    number = math.ceil(len(addresses) / (MAX_PEERS + 1))
    return [(group[0], tuple(group[1:])) for group in (addresses[i::number] for i in range(number)) if group]


async def ask_tree(
    addresses: Sequence[str],
    query: pb.QueryRequest,
    read: Read[T],
    ask: Ask[T],
    timeout: float,
    policy: Policy,
    channels: Channels,
    credentials: Credentials,
    *,
    room: Callable[[int], None] = lambda _: None,
    answered: Callable[[str, bool], None] = lambda *_: None,
) -> Gathered[T]:
    """As ``ask_many``, by a tree. ``read`` reads the answer to ``query`` of a node that another one asked; ``room`` is
    called with the bytes that are held, or not any more, and raises where they are too many; ``answered`` as there. A
    node that has to be shown a token itself is asked directly: no other one learns it."""
    unique = tuple(dict.fromkeys(addresses))
    deadline = time.monotonic() + timeout
    tree = _Tree(query, read, channels, credentials, room, answered)
    places = asyncio.Semaphore(_AT_ONCE)

    async def below(group: Group) -> None:
        async with places:
            await tree.ask(group, (deadline - time.monotonic()) * _SHARE)

    middle = groups_of([address for address in unique if credentials.may_be_passed_on(address)])
    alone = [address for address in unique if not credentials.may_be_passed_on(address)]
    loop = asyncio.get_running_loop()
    # First who is asked by nobody else.
    asked = [*alone, *(parent for parent, _ in middle)]
    own = loop.create_task(ask_many(asked, ask, timeout * _SHARE, policy, answered=answered))
    tasks = [loop.create_task(below(group)) for group in middle]
    try:
        await asyncio.gather(*tasks)
        first = await own
        left = [a for _, children in middle for a in children if a not in tree.found]
        second = await ask_many(left, ask, max(deadline - time.monotonic(), 0.1), policy, answered=answered)
    finally:
        for task in (*tasks, own):
            task.cancel()
        await asyncio.gather(*tasks, own, return_exceptions=True)
    return _together(unique, tree, (first, second))


def _together(addresses: tuple[str, ...], tree: _Tree[T], direct: Sequence[Gathered[T]]) -> Gathered[T]:
    outcome: Gathered[T] = Gathered(addresses)
    answered = {a.address: (a.node, a.value) for gathered in direct for a in gathered.answered}
    failed = {f.address: f for gathered in direct for f in gathered.failed}
    for address in addresses:
        found = tree.found.get(address) or answered.get(address)
        if isinstance(found, ProbingError):
            outcome.failed.append(Failed(address, "", found))
        elif found is not None:
            outcome.add(address, *found)
        else:
            outcome.failed.append(failed[address])
    outcome.detours = tree.broken
    return outcome


class _Tree(Generic[T]):
    """``found``: the answer or error of each node that another one has passed on. ``broken``: who did not do so."""

    def __init__(
        self,
        query: pb.QueryRequest,
        read: Read[T],
        channels: Channels,
        credentials: Credentials,
        room: Callable[[int], None],
        answered: Callable[[str, bool], None],
    ) -> None:
        self.found: dict[str, tuple[str, T] | ProbingError] = {}
        self.broken: list[Failed] = []
        self._query = query
        self._read = read
        self._channels = channels
        self._credentials = credentials
        self._room = room
        self._answered = answered

    async def ask(self, group: Group, seconds: float) -> None:
        """Asks the first node of ``group`` for the answers of the others."""
        parent, children = group
        if not children or seconds <= 0:
            return
        query = pb.QueryRequest()
        query.CopyFrom(self._query)
        query.timeout_ms = max(1, int(seconds * 1000))
        request = pb.QueryManyRequest(query=query, addresses=children)
        if self._credentials.token:
            request.shown.extend(map(self._credentials.authorization, children))
        channel = self._channels.take(parent)
        silence_s = max(_SILENCE_S, _SILENCE * seconds)
        sent_ns = time.time_ns()
        call: Any = channel.stub.QueryMany(request, timeout=seconds + 0.3, metadata=self._credentials.metadata(parent))
        halves: dict[str, list[pb.QueryReply]] = {}
        held = 0
        try:
            while (reply := await asyncio.wait_for(call.read(), silence_s)) is not grpc.aio.EOF:
                if reply.address in children and reply.address not in self.found:
                    held += self._take(reply, halves, sent_ns)
            if any(child not in self.found for child in children):
                self._break(parent, PeerError(f"{parent} did not pass on all answers"))
        except asyncio.TimeoutError:
            self._break(parent, PeerError(f"{parent} fell silent while it asked others"))
        except grpc.aio.AioRpcError as e:
            if e.code() is not grpc.StatusCode.UNIMPLEMENTED:
                error = channel.problem
                self._break(parent, await asyncio.to_thread(error_of, parent, e) if error is None else error)
        finally:
            call.cancel()
            self._room(-held)
            await self._channels.give_back(channel)

    def _take(self, reply: pb.QueryManyReply, halves: dict[str, list[pb.QueryReply]], sent_ns: int) -> int:
        """Keeps a reply about one node; returns the bytes that are held for it."""
        size = reply.ByteSize()
        self._room(size)
        parts = halves.setdefault(reply.address, [])
        parts.extend(reply.parts)
        if not reply.done:
            return size
        del halves[reply.address]
        if reply.HasField("error"):
            why = reply.error
            if why.kind not in _DIRECTLY:
                self.found[reply.address] = error_from(why.kind, why.message, why.hint)
                self._answered(reply.address, False)
            return size
        try:
            self.found[reply.address] = self._read(reply.address, parts, sent_ns)
        except ProbingError as e:
            self.found[reply.address] = e
        self._answered(reply.address, not isinstance(self.found[reply.address], ProbingError))
        return size

    def _break(self, parent: str, error: ProbingError) -> None:
        self.broken.append(Failed(parent, "", error))
