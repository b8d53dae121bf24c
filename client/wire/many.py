"""Asks many nodes for rows: each node directly, or, if there are thousands, through some of them (a tree).

A node in the middle of the tree asks up to 128 nodes and relays their answers. An answer counts only when it is
complete. If a node in the middle dies, becomes silent, refuses, or cannot reach a node, the nodes whose answers are
missing are asked directly, so no row is lost or comes twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from probing.api.errors import LATE, TOO_LARGE, UNKNOWN_CALL, PeerError, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_PEERS, MAX_STATEMENTS, from_proto
from probing.client.wire.node import Node, Wire, query_of
from probing.client.wire.stream import Room, read_replies
from probing.federation.execution.answer import Failed, Gathered, Reply, Take
from probing.federation.execution.asking import Policy, ask_many
from probing.federation.execution.clocks import measured

__all__ = ("Named", "Question")

# If there are fewer nodes than this, all are asked directly.
TREE_FROM = 2048
# The maximum number of nodes in the middle that are asked at once, and the share of the time limit that each gets.
_AT_ONCE = 32
_SHARE = 0.8
# A node in the middle sends a message at least every half second. It is given up after a silence of _SILENCE_S (s) or
# of this share of its time limit, whichever is longer.
_SILENCE_S = 3.0
_SILENCE = 0.25
# Errors that the node in the middle may have caused. The node behind it may answer if it is asked directly.
_DIRECTLY = frozenset(("NotFound", "Overloaded", "PeerError", "PrivilegeError", "Unauthenticated", "UsageError"))
# The name of a node, and its replies.
Named = tuple[str, tuple[Reply, ...]]


class Question:
    """One question to all nodes for the rows of ``statements`` (SQL by name). ``max_bytes`` bounds all answers
    together.
    """

    def __init__(
        self,
        wire: Wire,
        statements: Mapping[str, str],
        take: Take,
        *,
        max_bytes: int,
        strict: bool = False,
        watch: Callable[[str, pb.QueryProgress], None] | None = None,
        policy: Policy | None = None,
        done: Callable[[int, int], None] = lambda *_: None,
        may_lack: bool = False,
    ) -> None:
        """Makes the question. ``done`` is called with the number of nodes that have answered or failed, and the number
        of all nodes. ``watch``: see ``Nodes``. ``may_lack``: see ``Node.replies``.
        """
        self._wire = wire
        self._statements = statements
        self._query = query_of(statements, max_bytes, named=may_lack or len(statements) != 1)
        self._may_lack = may_lack
        self._take = take
        self._room = Room(max_bytes)
        self._strict = strict
        self._watch = watch
        self._policy = policy or Policy()
        self._done = done
        self._answered: Callable[..., None] = done
        # Answers and failures by address.
        self._results: dict[str, Named | Failed] = {}
        # Nodes in the middle that did not relay all answers.
        self._broken: list[Failed] = []
        # Nodes that a node in the middle could not reach.
        self._unreached: set[str] = set()

    async def ask(self, addresses: Sequence[str], timeout: float) -> Gathered[tuple[Reply, ...]]:
        """Returns the replies of each node, in the form of ``answer.Gather``."""
        unique, numbers = tuple(dict.fromkeys(addresses)), count(1)
        self._answered = lambda *_: self._done(next(numbers), len(unique))
        if len(unique) < TREE_FROM or len(self._statements) > MAX_STATEMENTS:
            return await self._directly(unique, timeout)
        return await self.by_tree(unique, timeout)

    async def _directly(self, addresses: Sequence[str], seconds: float) -> Gathered[tuple[Reply, ...]]:
        alive = self._wire.channels.connected
        return await ask_many(addresses, self.one, seconds, self._policy, alive=alive, answered=self._answered)

    async def one(self, address: str, seconds: float, attempt: int) -> Named:
        """Returns the answer of one node."""
        watch = self._watch
        replies = await Node(address, self._wire).replies(
            self._statements,
            seconds,
            self._room,
            watch=None if watch is None else lambda progress: watch(address, progress),
            strict=self._strict,
            # The old connection may be the cause of the failure.
            apart=attempt > 0,
            may_lack=self._may_lack,
        )
        return replies[0].node, tuple(map(self._take, replies))

    async def passed_on(self, address: str, parts: list[pb.QueryReply], sent_ns: int) -> Named:
        """Returns the answer of the node at ``address``, which a node in the middle relayed in ``parts``. ``sent_ns``:
        the time of the question, UTC ns.
        """
        if not parts:
            raise PeerError(f"{address} has an empty answer")
        received_ns, messages = time.time_ns(), iter(parts)

        async def receive() -> pb.QueryReply | None:
            return next(messages, None)

        replies, node_ns = await read_replies(receive, self._query, strict=self._strict)
        clock = measured(sent_ns, received_ns, node_ns)
        for reply in replies:
            self._wire.credentials.check(address, reply.node)
        return replies[0].node, tuple(self._take(replace(reply, clock=clock)) for reply in replies)

    async def by_tree(self, addresses: tuple[str, ...], timeout: float) -> Gathered[tuple[Reply, ...]]:
        """Does the same as ``ask``, through nodes in the middle. A node that must be shown the token itself is asked
        directly, so that no other node learns it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        places = asyncio.Semaphore(_AT_ONCE)

        async def below(parent: str, children: Sequence[str]) -> None:
            async with places:
                await self._by_way_of(parent, children, (deadline - loop.time()) * _SHARE)

        may_be_passed_on = self._wire.credentials.may_be_passed_on
        groups = _groups_of([address for address in addresses if may_be_passed_on(address)])
        # These nodes are asked directly, because no node in the middle asks them.
        first = [*(a for a in addresses if not may_be_passed_on(a)), *(parent for parent, *_ in groups)]
        own = loop.create_task(self._directly(first, timeout * _SHARE))
        tasks = [own, *(loop.create_task(below(parent, children)) for parent, *children in groups if children)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        left = [child for _, *children in groups for child in children if child not in self._results]
        for gathered in own.result(), await self._directly(left, max(deadline - loop.time(), 0.1)):
            self._results |= {a.address: (a.node, a.value) for a in gathered.answered}
            self._results |= {failed.address: failed for failed in gathered.failed}
        outcome: Gathered[tuple[Reply, ...]] = Gathered(addresses, detours=self._broken)
        for address in addresses:
            result = self._results[address]
            if isinstance(result, Failed):
                outcome.failed.append(result)
            else:
                outcome.add(address, *result)
        return outcome

    async def _by_way_of(self, parent: str, children: Sequence[str], seconds: float) -> None:
        """Asks ``parent`` for the answers of ``children``."""
        if seconds <= 0:
            return
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
        call = None
        try:
            call = self._wire.call(parent, "QueryMany", request, seconds)
            while (reply := await asyncio.wait_for(call.next(), silence_s)) is not None:
                if reply.address in children and reply.address not in self._results:
                    size = reply.ByteSize()
                    held += size
                    self._room.take(size)
                    await self._keep(reply, halves, sent_ns)
            if not self._unreached.union(self._results).issuperset(children):
                raise PeerError(f"{parent} did not pass on all answers")
        except asyncio.TimeoutError:
            self._broken.append(Failed(parent, "", PeerError(f"{parent} fell silent while it asked other nodes")))
        except ProbingError as e:
            if e.code == TOO_LARGE:
                raise
            # A node in the middle may be too old for this call; the nodes behind it are then asked directly.
            if e.code != UNKNOWN_CALL:
                self._broken.append(Failed(parent, "", e))
        finally:
            if call is not None:
                call.end()
            self._room.give_back(held)

    async def _keep(self, reply: pb.QueryManyReply, halves: dict[str, list[pb.QueryReply]], sent_ns: int) -> None:
        """Keeps a reply about one node. ``halves`` has the parts of answers that are not complete yet."""
        address = reply.address
        parts = halves.setdefault(address, [])
        parts.extend(reply.parts)
        if not reply.done:
            return
        del halves[address]
        if not reply.HasField("error"):
            try:
                self._results[address] = await self.passed_on(address, parts, sent_ns)
            except PeerError:
                # Nothing is stored, so the node is asked directly: the node in the middle may have damaged the answer.
                return
            except ProbingError as e:
                self._results[address] = Failed(address, "", e)
        elif not _is_of_middle(error := from_proto(reply.error)):
            self._results[address] = Failed(address, "", error)
        elif isinstance(error, PeerError):
            self._unreached.add(address)
        if address in self._results:
            self._answered()


def _is_of_middle(error: ProbingError) -> bool:
    """Returns whether a node should be asked directly after a node in the middle reported ``error`` for it. LATE: no,
    because the node has used up its time. TOO_LARGE: yes, because an answer that is too large to be relayed may fit
    into the memory of this process.
    """
    return (error.kind in _DIRECTLY and error.code != LATE) or error.code == TOO_LARGE


def _groups_of(addresses: Sequence[str]) -> list[list[str]]:
    """Returns groups of nodes of about equal size; the first node of each group asks the other nodes of the group."""
    number = math.ceil(len(addresses) / (MAX_PEERS + 1))
    return [list(addresses[i::number]) for i in range(number)]
