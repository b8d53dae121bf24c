"""Asks many nodes for rows: each directly, or thousands by way of some of them.

A node in the middle of such a tree asks up to 128 others and passes their answers on. An answer counts once it is
whole. What a node in the middle did not pass on, because it died, fell silent or refused, is asked for directly, so
that no row is lost or comes twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Generic, TypeVar

from probing.api.errors import TOO_LARGE, UNKNOWN_CALL, PeerError, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_PEERS, MAX_STATEMENTS, UNLIMITED, from_proto
from probing.client.wire.node import Node, Wire, query_of
from probing.client.wire.stream import Room, read_replies
from probing.federation.execution.answer import Failed, Gathered, Reply, Take
from probing.federation.execution.asking import Ask, Policy, ask_many
from probing.federation.execution.clocks import measured

__all__ = ("Question", "ask_tree")

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
# A node in the middle, and those that it asks.
_Group = tuple[str, tuple[str, ...]]
# Reads the messages of one node, asked at a time (wall clock, ns); returns its name and answer, or raises ProbingError.
Read = Callable[[str, list[pb.QueryReply], int], Awaitable[tuple[str, T]]]


class Question:
    """``statements`` (SQL by name) to all nodes. ``max_bytes`` bounds their answers together."""

    def __init__(
        self,
        wire: Wire,
        statements: Mapping[str, str],
        take: Take,
        *,
        max_bytes: int,
        strict: bool = False,
        watch: Callable[[str, pb.QueryProgress], None] | None = None,
    ) -> None:
        self._wire = wire
        self._statements = statements
        self._take = take
        self._room = Room(max_bytes)
        self._strict = strict
        self._watch = watch

    async def ask(
        self, addresses: Sequence[str], timeout: float, policy: Policy, done: Callable[[int, int], None]
    ) -> Gathered[tuple[Reply, ...]]:
        """Returns the replies of each node, as ``answer.Gather``. ``done(nodes, all)`` is called when so many of all
        nodes have answered or failed."""
        numbers = count(1)

        def one_more(*_: object) -> None:
            done(next(numbers), len(addresses))

        if len(addresses) < TREE_FROM or len(self._statements) > MAX_STATEMENTS:
            alive = self._wire.channels.connected
            return await ask_many(addresses, self._one, timeout, policy, alive=alive, answered=one_more)
        query = query_of(self._statements, self._room.max_bytes, named=len(self._statements) > 1)
        return await ask_tree(
            addresses,
            query,
            self._passed_on,
            self._one,
            timeout,
            policy,
            self._wire,
            room=self._room,
            answered=one_more,
        )

    async def _one(self, address: str, seconds: float, attempt: int) -> tuple[str, tuple[Reply, ...]]:
        watch = self._watch
        replies = await Node(address, self._wire).replies(
            self._statements,
            seconds,
            self._room,
            watch=None if watch is None else lambda progress: watch(address, progress),
            strict=self._strict,
            # The connection may be what broke or stalled.
            apart=attempt > 0,
        )
        return replies[0].node, tuple(map(self._take, replies))

    async def _passed_on(self, address: str, parts: list[pb.QueryReply], sent_ns: int) -> tuple[str, tuple[Reply, ...]]:
        """Reads the answer of a node that another one has asked for us."""
        if not parts:
            raise PeerError(f"{address} has an empty answer")
        request = query_of(self._statements, UNLIMITED, named=len(self._statements) > 1)
        received_ns, messages = time.time_ns(), iter(parts)

        async def receive() -> pb.QueryReply | None:
            return next(messages, None)

        replies, node_ns = await read_replies(receive, request, strict=self._strict)
        clock = measured(sent_ns, received_ns, node_ns)
        for reply in replies:
            self._wire.credentials.check(address, reply.node)
        return replies[0].node, tuple(self._take(replace(reply, clock=clock)) for reply in replies)


def _groups_of(addresses: Sequence[str]) -> list[_Group]:
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
    wire: Wire,
    *,
    room: Room,
    answered: Callable[[str, bool], None] = lambda *_: None,
) -> Gathered[T]:
    """As ``ask_many``, by a tree. ``read`` reads the answer to ``query`` of a node that another one asked; ``room`` is
    for the bytes that are held; ``answered`` as there. A node that has to be shown a token itself is asked directly: no
    other one learns it."""
    unique = tuple(dict.fromkeys(addresses))
    deadline = time.monotonic() + timeout
    tree = _Tree(query, read, wire, room, answered)
    places = asyncio.Semaphore(_AT_ONCE)

    async def below(group: _Group) -> None:
        async with places:
            await tree.ask(group, (deadline - time.monotonic()) * _SHARE)

    passed_on = wire.credentials.may_be_passed_on
    middle = _groups_of([address for address in unique if passed_on(address)])
    # First who is asked by nobody else.
    first = [*(address for address in unique if not passed_on(address)), *(parent for parent, _ in middle)]
    loop = asyncio.get_running_loop()
    own = loop.create_task(ask_many(first, ask, timeout * _SHARE, policy, answered=answered))
    tasks = [loop.create_task(below(group)) for group in middle]
    try:
        await asyncio.gather(*tasks)
        direct = await own
        left = [a for _, children in middle for a in children if a not in tree.found]
        second = await ask_many(left, ask, max(deadline - time.monotonic(), 0.1), policy, answered=answered)
    finally:
        for task in (*tasks, own):
            task.cancel()
        await asyncio.gather(*tasks, own, return_exceptions=True)
    return _together(unique, tree, (direct, second))


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
        wire: Wire,
        room: Room,
        answered: Callable[[str, bool], None],
    ) -> None:
        self.found: dict[str, tuple[str, T] | ProbingError] = {}
        self.broken: list[Failed] = []
        self._query = query
        self._read = read
        self._wire = wire
        self._room = room
        self._answered = answered

    async def ask(self, group: _Group, seconds: float) -> None:
        """Asks the first node of ``group`` for the answers of the others."""
        parent, children = group
        if not children or seconds <= 0:
            return None
        query = pb.QueryRequest()
        query.CopyFrom(self._query)
        query.timeout_ms = max(1, int(seconds * 1000))
        request = pb.QueryManyRequest(query=query, addresses=children)
        credentials = self._wire.credentials
        if credentials.token:
            request.shown.extend(map(credentials.authorization, children))
        silence_s = max(_SILENCE_S, _SILENCE * seconds)
        sent_ns = time.time_ns()
        halves: dict[str, list[pb.QueryReply]] = {}
        held = 0
        try:
            call = self._wire.call(parent, "QueryMany", request, seconds)
        except ProbingError as e:
            return self._break(parent, e)
        try:
            while (reply := await asyncio.wait_for(call.next(), silence_s)) is not None:
                if reply.address in children and reply.address not in self.found:
                    size = reply.ByteSize()
                    held += size
                    self._room.take(size)
                    await self._read_of(reply, halves, sent_ns)
            if any(child not in self.found for child in children):
                self._break(parent, PeerError(f"{parent} did not pass on all answers"))
        except asyncio.TimeoutError:
            self._break(parent, PeerError(f"{parent} fell silent while it asked others"))
        except ProbingError as e:
            if e.code == TOO_LARGE:
                raise
            # An older node does not know the call: those that it should ask are asked directly.
            if e.code != UNKNOWN_CALL:
                self._break(parent, e)
        finally:
            call.end()
            self._room.give_back(held)

    async def _read_of(self, reply: pb.QueryManyReply, halves: dict[str, list[pb.QueryReply]], sent_ns: int) -> None:
        """Keeps a reply about one node."""
        address = reply.address
        parts = halves.setdefault(address, [])
        parts.extend(reply.parts)
        if not reply.done:
            return
        del halves[address]
        if reply.HasField("error"):
            if reply.error.kind not in _DIRECTLY:
                self.found[address] = from_proto(reply.error)
                self._answered(address, False)
            return
        try:
            self.found[address] = await self._read(address, parts, sent_ns)
        except ProbingError as e:
            self.found[address] = e
        self._answered(address, not isinstance(self.found[address], ProbingError))

    def _break(self, parent: str, error: ProbingError) -> None:
        self.broken.append(Failed(parent, "", error))
