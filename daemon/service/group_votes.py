"""Answers the other nodes of a group: votes on the group's record, grants leases, returns rows of workers, and finds a
port for the master.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from probing.api.errors import FormatError, PrivilegeError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape
from probing.daemon.groups.workers import Workers
from probing.daemon.query.caller import Caller
from probing.daemon.service.group_peers import (
    Entry,
    Records,
    ballot_of,
    free_port,
    packed_ballot,
    packed_proposal,
    proposal_of,
)
from probing.groups.register import Accepted, Committed, Promise, Proposal, Refusal
from probing.groups.report import rows_json
from probing.groups.spec import NAME

__all__ = ("GroupVotes",)

# How long a port stays reserved for the group that got it, s. The group's rank 0 begins to listen within this time.
_PORT_S = 60.0


class GroupVotes:
    """Makes this node's answers to the other nodes of its groups. Belongs to one event loop. ``now``: a clock like
    time.monotonic(), s.
    """

    def __init__(
        self, node: str, records: Records, workers: Workers, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._records, self._workers, self._now = node, records, workers, now
        # The port that was found on this node for each group, and the time until which it stays reserved.
        self._ports: dict[str, tuple[int, float]] = {}
        self._finding = asyncio.Lock()

    async def agree(self, request: pb.AgreeRequest, caller: Caller | None = None) -> pb.AgreeReply:
        """Answers another node, or this node if ``caller`` is None. Raises ProbingError."""
        name, step = request.group, request.WhichOneof("step")
        if not NAME.fullmatch(name):
            raise FormatError("the message has no name of a group")
        reply = pb.AgreeReply(node=self._node, agrees=True)
        if step in ("prepare", "accept", "learn"):
            # A committed record owns the name, so ``learn`` takes it even if this node has accepted a record with
            # another id under that name.
            entry = self._records.entry(name, "" if step == "learn" else request.id)
            _check_member(request, entry, caller)
            await self._vote(name, request, reply)
        elif step == "lease":
            found = self._records.find(name)
            reply.agrees = found is not None and found.id == request.id and found.generation <= request.lease
        elif step == "rows":
            found = self._records.find(name)
            known = found.known if found else None
            reply.rows = rows_json(self._workers.of_group(name, known.spec.uid) if known else ())
        elif step == "port":
            reply.port = await self._port(name, max(1, request.port))
        return reply

    async def _vote(self, name: str, request: pb.AgreeRequest, reply: pb.AgreeReply) -> None:
        answer: Promise | Accepted | Refusal
        if request.HasField("learn"):
            proposal = proposal_of(request.learn)
            await self._records.learn(name, Committed(proposal.ballot, proposal.value))
            return
        if request.HasField("prepare"):
            answer = await self._records.prepare(name, ballot_of(request.prepare))
        else:
            answer = await self._records.accept(name, proposal_of(request.accept))
        if isinstance(answer, Refusal):
            reply.agrees = False
            reply.promised.CopyFrom(packed_ballot(answer.promised))
        elif isinstance(answer, Promise):
            committed = answer.committed
            reply.accepted.CopyFrom(packed_proposal(answer.accepted))
            reply.committed.CopyFrom(packed_proposal(Proposal(committed.ballot, committed.value)))

    async def _port(self, name: str, first: int) -> int:
        """Returns a free port, and keeps it for the group until its ranks have begun to listen."""
        # Ports are found one at a time, since groups that start together would find the same port.
        async with self._finding:
            return await self._found_port(name, first)

    async def _found_port(self, name: str, first: int) -> int:
        now = self._now()
        taken = {port for group, (port, until) in self._ports.items() if group != name and until > now}
        for other, entry in self._records.entries.items():
            if (group := entry.known) is not None and group.phase == "running" and other != name:
                taken |= {group.port} if group.ranks()[0].node == self._node else set()
        port = await asyncio.to_thread(free_port, first, taken)
        if name in self._records.entries:
            self._ports[name] = port, now + _PORT_S
        return port


def _check_member(request: pb.AgreeRequest, entry: Entry, caller: Caller | None) -> None:
    """Raises PrivilegeError if certificates prove that the caller is not a node of the group, or uses the ballot of
    another node.
    """
    if caller is None or not caller.nodes:
        return
    if entry.known is not None and caller.nodes.isdisjoint(node.lower() for node in entry.known.nodes):
        raise PrivilegeError(f"{caller.name} is not a node of group {request.group}")
    ballot = request.prepare if request.HasField("prepare") else request.accept.ballot
    if not request.HasField("learn") and ballot.node.lower() not in caller.nodes:
        raise PrivilegeError(f"{caller.name} proposes in the name of node {escape(ballot.node, 64)}")
