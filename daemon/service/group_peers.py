"""Agrees with other nodes on the records of groups: the acceptors of this node, and its calls to others."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc.aio

from probing.api.errors import FormatError, Overloaded, PeerError, PrivilegeError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import size
from probing.api.typed import typed_json
from probing.daemon.cluster import Member, Membership
from probing.daemon.ipc import Header
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.outgoing import PeerStubs
from probing.groups.group import Group
from probing.groups.register import Accepted, Acceptor, Ballot, Committed, Promise, Proposal, Refusal
from probing.groups.spec import MAX_GROUPS, PORTS

__all__ = (
    "Entry",
    "GroupPeers",
    "Records",
    "ballot_of",
    "free_port",
    "packed_ballot",
    "packed_proposal",
    "proposal_of",
)

CALL_S = 2.0
_MEMBERS_S = 1.0
_KEEP_S = 5.0
# The maximum number of groups of one user, and the maximum size of their records, bytes.
_MAX_OWNED, _MAX_OWNED_BYTES = MAX_GROUPS // 4, 16 << 20
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record on disk. ``number``: the sequence number of the write, counted over all groups."""

    number: int
    acceptor: Header


@dataclass(slots=True)
class Entry:
    """What this node knows about a group. ``known``: the newest committed record that this node has learned."""

    acceptor: Acceptor = field(default_factory=Acceptor)
    known: Group | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    # The accepted record that was read last, and its text.
    _read: tuple[bytes, Group] | None = None

    @property
    def record(self) -> Group | None:
        """The record that decides who owns the group: ``known``, or else the accepted record; None without records."""
        value = self.acceptor.accepted.value
        if self.known is not None or not value:
            return self.known
        if self._read is None or self._read[0] != value:
            self._read = value, Group.from_json(value)
        return self._read[1]

    @property
    def id(self) -> str:
        """The id of the group in ``record``; empty if there is no record yet."""
        record = self.record
        return record.spec.id if record else ""

    @property
    def ballot(self) -> Ballot:
        """The ballot of ``known``."""
        return self.acceptor.committed.ballot

    @property
    def generation(self) -> int:
        """The highest generation in a record that this node has accepted or learned."""
        accepted, known = self.acceptor.accepted, self.known.generation if self.known else 0
        return known if accepted.ballot <= self.ballot else max(known, Group.from_json(accepted.value).generation)


class Records:
    """The entries of all groups, which are on disk before a call returns. Belongs to one event loop.

    A name without an accepted record is only in memory. If there are too many such names, the least recently used name
    is forgotten, since anybody can ask about names. That is safe: no record depends on a promise for such a name. At
    worst two groups are created under one name at the same time, see ``learn``.

    ``on_news`` is called with the name and the entry of a group once a newer record is known, even if the sender of the
    record has gone away by then.
    """

    def __init__(self, collector: CollectorClient) -> None:
        self._collector = collector
        self.on_news: Callable[[str, Entry], None] = lambda *_: None
        self.entries: dict[str, Entry] = {}
        # Names without a record, the least recently used first.
        self._unknown: OrderedDict[str, Entry] = OrderedDict()
        self._loaded = asyncio.Event()
        self._damaged: set[str] = set()
        self._number = 0

    async def load(self) -> None:
        """Reads the records that were kept. Raises PeerError while the collector does not answer."""
        records, damaged = await asyncio.to_thread(self._collector.kept_groups, _KEEP_S)
        self._damaged = set(damaged)
        for name, text in records.items():
            try:
                kept = typed_json(_Kept, text.encode())
                acceptor = Acceptor.from_dict(kept.acceptor)
                value = acceptor.committed.value
                self.entries.setdefault(name, Entry(acceptor, Group.from_json(value) if value else None))
                self._number = max(self._number, kept.number)
            except (FormatError, ValueError) as e:
                _log.error("the record of group %.80r cannot be read, so this node has no vote on it: %s", name, e)
                self._damaged.add(name)
        self._loaded.set()

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    async def await_loaded(self) -> None:
        """Waits for ``load``, at most _KEEP_S, because the service answers before the collector does. Raises PeerError
        if the records are not loaded in this time.
        """
        try:
            await asyncio.wait_for(self._loaded.wait(), _KEEP_S)
        except asyncio.TimeoutError:
            raise _starting() from None

    def find(self, name: str) -> Entry | None:
        """Returns the entry of the group with this name; None for an unknown group.

        Raises PeerError before the records are loaded, and for a group whose record cannot be read: without it this
        node might break its promises.
        """
        if not self.loaded:
            raise _starting()
        if name in self._damaged:
            raise PeerError(
                f"the record of group {name} cannot be read here", hint="the daemon's log names the file of the record"
            )
        return self.entries.get(name)

    def entry(self, name: str, identity: str = "") -> Entry:
        """Returns the entry of the group with this name and id. Makes a new entry for an unknown name.

        Raises PeerError as ``find`` does, and PrivilegeError if another group has the name.
        """
        entry = self.find(name)
        if entry is None:
            entry = self._unknown.setdefault(name, Entry())
            self._unknown.move_to_end(name)
            if len(self._unknown) > MAX_GROUPS:
                idle = (other for other, one in self._unknown.items() if one is not entry and not one.lock.locked())
                self._unknown.pop(next(idle, ""), None)
        if identity and entry.id not in ("", identity):
            raise PrivilegeError(f"another group has the name {name} here", hint="give the group another name")
        return entry

    async def prepare(self, name: str, ballot: Ballot) -> Promise | Refusal:
        entry = self.entry(name)

        async def prepared() -> Promise | Refusal:
            acceptor, answer = entry.acceptor.prepare(ballot)
            await self._keep(name, entry, acceptor)
            return answer

        return await _whole(entry, prepared)

    async def accept(self, name: str, proposal: Proposal) -> Accepted | Refusal:
        """Accepts a record. Raises FormatError for a malformed record, PrivilegeError for a record of another owner."""
        entry = self.entry(name)
        group = _checked(name, proposal.value, entry.record)

        async def accepted() -> Accepted | Refusal:
            _check_order(entry.known, group)
            self.check_room(name, group, len(proposal.value))
            acceptor, answer = entry.acceptor.accept(proposal)
            await self._keep(name, entry, acceptor)
            return answer

        return await _whole(entry, accepted)

    async def learn(self, name: str, committed: Committed) -> None:
        """Stores a committed record if it is newer than the known record."""
        entry = self.entry(name)
        if committed.ballot <= entry.ballot:
            return
        group = _checked(name, committed.value, entry.known)

        async def learned() -> None:
            if committed.ballot <= entry.ballot:
                return
            _check_order(entry.known, group)
            self.check_room(name, group, len(committed.value))
            acceptor = entry.acceptor.learn(committed)
            if entry.id not in ("", group.spec.id):
                # This node accepted a record of a second group, created at the same time under the same name, but the
                # voters did not choose it. From now on this node refuses messages about the second group, so it may
                # forget that record.
                acceptor = replace(acceptor, accepted=Proposal())
            await self._keep(name, entry, acceptor)
            entry.known = group
            self.on_news(name, entry)

        await _whole(entry, learned)

    def check_room(self, name: str, group: Group, length: int) -> None:
        """Raises Overloaded if this node has too many groups, or if the owner of ``group`` has too many groups or too
        large records on this node.
        """
        spec, number = group.spec, 1
        if name not in self.entries and len(self.entries) >= MAX_GROUPS:
            raise Overloaded(f"this node has {MAX_GROUPS} groups", hint="give a group of yours a new specification")
        for other, entry in self.entries.items():
            if other != name and (record := entry.record) is not None and record.spec.uid == spec.uid:
                kept = entry.acceptor.committed.value or entry.acceptor.accepted.value
                number, length = number + 1, length + len(kept)
        if number > _MAX_OWNED or length > _MAX_OWNED_BYTES:
            raise Overloaded(
                f"{spec.owner} has {number} groups with {size(length)} on this node, and a user may have "
                f"{_MAX_OWNED} with {size(_MAX_OWNED_BYTES)}",
                hint="give a group of yours a new specification",
            )

    async def _keep(self, name: str, entry: Entry, acceptor: Acceptor) -> None:
        """Makes ``acceptor`` the state of the entry. If there is a record, writes the state to disk first."""
        if self.entries.get(name, self._unknown.get(name)) is not entry:
            raise PeerError(f"the name {name} was forgotten meanwhile", hint="ask again")
        if acceptor == entry.acceptor:
            return
        if name in self.entries or acceptor.accepted.value or acceptor.committed.value:
            self.entries[name] = entry
            self._unknown.pop(name, None)
            self._number += 1
            text = json.dumps({"number": self._number, "acceptor": acceptor.to_dict()}, separators=(",", ":")).encode()
            try:
                await asyncio.to_thread(self._collector.keep_group, name, text, self._number, _KEEP_S)
            except BaseException:
                if entry.acceptor == Acceptor(promised=entry.acceptor.promised):
                    self._unknown[name] = self.entries.pop(name)
                raise
        entry.acceptor = acceptor


def _starting() -> PeerError:
    return PeerError("this node is starting", hint="ask again in some seconds")


async def _whole(entry: Entry, step: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Returns the result of ``step``, which runs to its end under the lock of the entry even if the caller goes away.

    Without the lock, a write whose caller has gone away could end after a newer write.
    """

    async def locked() -> _T:
        async with entry.lock:
            return await step()

    return await asyncio.shield(asyncio.create_task(locked()))


def _check_order(known: Group | None, group: Group) -> None:
    """Raises FormatError if one of the record's numbers is lower than in the known record, so it cannot be a later
    record.
    """
    if known is not None and any(new < old for new, old in zip(_numbers(group), _numbers(known), strict=True)):
        raise FormatError(f"the record of group {known.spec.name} is older than the record here")


def _numbers(group: Group) -> tuple[int, int, int]:
    return group.generation, group.spec.version, group.order.generation if group.order else 0


def _checked(name: str, record: bytes, before: Group | None) -> Group:
    """Returns the parsed record. Raises FormatError for a record of another name, and PrivilegeError for a record of
    another owner: a group belongs to the first owner whose record this node has.
    """
    group = Group.from_json(record)
    if group.spec.name != name:
        raise FormatError(f"the record is of group {group.spec.name[:64]}")
    if before is not None and (before.key, before.spec.id) != (group.key, group.spec.id):
        raise PrivilegeError(f"group {name} belongs to {before.spec.owner}", hint="give the group another name")
    return group


class GroupPeers:
    """Calls Agree of other nodes, and ``local`` in place of a call to this node. Implements ``proposer.Peers``.
    ``now``: a clock like time.monotonic(), s.
    """

    def __init__(
        self,
        membership: Membership,
        stubs: PeerStubs,
        local: Callable[[pb.AgreeRequest], Any],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._stubs = stubs
        self._local = local
        self._now = now
        # The members by name, and when they were read.
        self._members: dict[str, Member] = {}
        self._read = -math.inf

    async def ask(self, node: str, request: pb.AgreeRequest, seconds: float = CALL_S) -> pb.AgreeReply:
        """Returns the reply of ``node``. Raises PeerError, FormatError or PrivilegeError."""
        if node == self._membership.name:
            reply: pb.AgreeReply = await self._local(request)
            return reply
        address = self.address(node)
        try:
            async with self._stubs.use(address) as stub:
                metadata = self._stubs.metadata(address)
                reply = await asyncio.wait_for(stub.Agree(request, timeout=seconds, metadata=metadata), seconds)
        except grpc.aio.AioRpcError as e:
            raise PeerError(f"node {node} does not answer: {str(e.details() or e.code().name)[:200]}") from None
        except asyncio.TimeoutError:
            raise PeerError(f"node {node} does not answer within {seconds:g} s") from None
        if reply.node != node:
            raise PeerError(f"{node} answers as {reply.node[:100]}", hint="give every daemon its own --node-name")
        return reply

    def address(self, node: str) -> str:
        """Returns the address of ``node``. Raises PeerError for an unknown node."""
        member = self._by_name().get(node)
        if member is not None and member.address:
            return member.address
        raise PeerError(f"node {node} is not known here", hint="`probingctl nodes` lists the nodes that are known")

    def states(self) -> Mapping[str, str]:
        """Returns the state of each node that this node knows."""
        return {name: member.state for name, member in self._by_name().items()}

    def _by_name(self) -> Mapping[str, Member]:
        """Returns the members, at most _MEMBERS_S old: listing a thousand takes some ms, and each call needs them."""
        if self._now() - self._read >= _MEMBERS_S:
            self._members = {member.name: member for member in self._membership.members()}
            self._read = self._now()
        return self._members

    def for_group(self, name: str, identity: str) -> _GroupRegister:
        return _GroupRegister(self, name, identity)


class _GroupRegister:
    """The register of one group on all nodes."""

    def __init__(self, peers: GroupPeers, name: str, identity: str) -> None:
        self._peers = peers
        self._name, self._id = name, identity

    async def prepare(self, node: str, ballot: Ballot) -> Promise | Refusal:
        reply = await self._peers.ask(
            node, pb.AgreeRequest(group=self._name, id=self._id, prepare=packed_ballot(ballot))
        )
        if not reply.agrees:
            return Refusal(ballot_of(reply.promised))
        committed = proposal_of(reply.committed)
        return Promise(proposal_of(reply.accepted), Committed(committed.ballot, committed.value))

    async def accept(self, node: str, proposal: Proposal) -> Accepted | Refusal:
        reply = await self._peers.ask(
            node, pb.AgreeRequest(group=self._name, id=self._id, accept=packed_proposal(proposal))
        )
        return Accepted(proposal.ballot) if reply.agrees else Refusal(ballot_of(reply.promised))


def packed_ballot(ballot: Ballot) -> pb.Ballot:
    return pb.Ballot(counter=ballot.counter, node=ballot.node)


def packed_proposal(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(ballot=packed_ballot(proposal.ballot), record=proposal.value, base=proposal.base)


def ballot_of(sent: pb.Ballot) -> Ballot:
    return Ballot(sent.counter, sent.node)


def proposal_of(sent: pb.Proposal) -> Proposal:
    return Proposal(ballot_of(sent.ballot), sent.record, tuple(sent.base))


def free_port(first: int, taken: Collection[int] = ()) -> int:
    """Returns the first free TCP port from ``first`` on that is not in ``taken``. Raises PeerError if none of the next
    PORTS ports is free.
    """
    for port in range(first, min(first + PORTS, 65_536)):
        if port in taken:
            continue
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as sock:
            # A recently ended rendezvous leaves connections in TIME_WAIT. With SO_REUSEADDR the next rendezvous can
            # listen anyway.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    raise PeerError(f"ports {first} to {first + PORTS - 1} are taken", hint="give another --master-port")
