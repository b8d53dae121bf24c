"""Gossip over gRPC: an asyncio task ticks the membership and calls peers; calls of peers are checked and answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import grpc
import grpc.aio

from probing.api.errors import Overloaded, PeerError, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster import Membership
from probing.daemon.cluster.keys import NONCE_BYTES, SIGNATURE_BYTES
from probing.daemon.cluster.messages import MAX_BYTES, MAX_MARKS, MAX_UPDATES, Call, Message
from probing.daemon.cluster.record import BUCKETS, Claim, Proof, Record, Update, checked_record
from probing.daemon.service.names import OF_NODES
from probing.daemon.service.outgoing import Outgoing, PeerStubs, lacks_name
from probing.daemon.source_state import SourceState, first_of

__all__ = (
    "Gossip",
    "message_of",
    "packed",
)


def packed(message: Message) -> pb.GossipMessage:
    return pb.GossipMessage(
        sender=_packed_record(message.sender),
        wall_ns=message.wall_ns,
        updates=[
            pb.MemberUpdate(record=_packed_record(update.record), claim=update.claim, since_s=update.since_s)
            for update in message.updates
        ],
        digests=message.digests,
        buckets=message.buckets,
        marks=message.marks,
        wanted=message.wanted,
        relay=message.relay,
        reached=message.reached,
        nonce=message.nonce,
        proof=message.proof,
        relayed=message.relayed,
    )


def message_of(sent: pb.GossipMessage, *, local: bool = False) -> Message:
    """Returns the message in ``sent``. Raises PeerError for a message that exceeds the limits or is invalid. ``local``:
    whether Unix sockets are valid addresses.
    """
    lists = len(sent.marks), len(sent.wanted), len(sent.buckets), len(sent.digests)
    if sent.ByteSize() > MAX_BYTES or len(sent.updates) > MAX_UPDATES or max(lists) > MAX_MARKS:
        raise PeerError("a message of gossip is too long")
    if max((update.claim for update in sent.updates), default=0) > max(Claim) or sent.wall_ns >= 1 << 63:
        raise PeerError("a message of gossip has no valid claim or time")
    if len(sent.nonce) not in (0, NONCE_BYTES) or max(len(sent.proof), len(sent.relayed)) > SIGNATURE_BYTES:
        raise PeerError("a message of gossip has no valid nonce or proof")
    return Message(
        _record(sent.sender, local),
        sent.wall_ns,
        tuple(Update.of(_record(u.record, local), Claim(u.claim), min(u.since_s, 1 << 40)) for u in sent.updates),
        tuple(sent.digests) if len(sent.digests) == BUCKETS else (),
        tuple(sent.buckets),
        tuple(sent.marks),
        tuple(sent.wanted),
        sent.relay[:255],
        sent.reached,
        sent.nonce,
        sent.proof,
        sent.relayed,
    )


def _packed_record(record: Record) -> pb.MemberRecord:
    return pb.MemberRecord(
        name=record.name,
        address=record.address,
        incarnation=record.incarnation,
        uid=record.uid,
        labels=dict(record.labels),
        jobs=record.jobs,
        version=record.version,
        engine=record.engine,
        key=record.key,
        signature=record.signature,
    )


def _record(sent: pb.MemberRecord, local: bool) -> Record:
    labels = tuple(sorted(sent.labels.items()))
    found = Record(
        sent.name,
        sent.address,
        sent.incarnation,
        sent.uid,
        labels,
        tuple(sent.jobs),
        sent.version,
        sent.engine,
        sent.key,
        sent.signature,
    )
    return checked_record(found, local=local)


MAX_CALLS = 64
MAX_RELAYS = 16
# The pause between two look-ups of the seeds that are given as ``dns:NAME:PORT``, s.
RESOLVE_S = 30.0
MAX_RESOLVED = 4096
COMPRESS_BYTES = 200
# The pause before TLS tries again to prove a node's name, after the node's certificate lacked the name, s.
NAMELESS_S = 3600.0
DNS = "dns:"
_log = logging.getLogger(__name__)


class Gossip:
    """Exchanges gossip with other nodes. ``seeds``: addresses, or ``dns:NAME:PORT`` for all addresses of a name.
    ``local``: whether addresses of peers may be Unix sockets.

    ``peers`` has the connections to other nodes. Belongs to one event loop.
    """

    def __init__(
        self,
        membership: Membership,
        seeds: Sequence[str] = (),
        *,
        local: bool = False,
        peers: PeerStubs | None = None,
    ) -> None:
        self._membership = membership
        self._seeds = tuple(seeds)
        self._local = local
        self._peers = peers or PeerStubs(Outgoing())
        self._calls: set[asyncio.Task[bytes | None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._relays = 0
        self._unresolved: dict[str, str] = {}
        self._skipped = 0
        # Whether this node's certificate contains its name.
        self._named = False
        # The time when a node's certificate was seen to lack the node's name, by name of the node.
        self._nameless: dict[str, float] = {}

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._resolve())]

    async def stop(self) -> None:
        for task in (*self._tasks, *self._calls):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)
        await self._peers.close()

    async def answer(self, sent: pb.GossipMessage, *, certified: bool = False) -> pb.GossipMessage:
        """Returns the answer to a peer's message. ``certified``: a certificate proves that the peer is the sender.

        Raises PeerError, Overloaded.
        """
        message = message_of(sent, local=self._local)
        proof: bytes | None = None
        call = self._membership.relay(message.relay, message.nonce) if message.relay else None
        if call is not None:
            if self._relays >= MAX_RELAYS:
                raise Overloaded(f"{MAX_RELAYS} pings for other nodes are under way")
            self._relays += 1
            try:
                proof = await self._call(call, call.seconds / 2)
            finally:
                self._relays -= 1
        reached = proof is not None
        return packed(self._membership.answer(message, reached=reached, relayed=proof or b"", certified=certified))

    def sources(self) -> list[SourceState]:
        """Returns the row about gossip for ``status`` and ``probing.sources``; an empty list if this node knows no
        other node and has no problem.
        """
        members = [member for member in self._membership.members() if member.name]
        problems = [*self._membership.problems(), *(f"{name}: {why}" for name, why in self._unresolved.items())]
        if (allowed := self._peers.outgoing.allowed) and (outside := allowed.outside()):
            named = ", ".join(outside[:3]) + (" and others" if len(outside) > 3 else "")
            problems.append(f"{len(outside)} addresses of nodes are outside cluster.allow: {named}")
        if len(members) < 2 and not problems:
            return []
        live = sum(m.state in ("healthy", "recovering") for m in members)
        detail = f"{live} of {len(members)} nodes are healthy"
        if unproven := [m.name for m in members if not m.proof]:
            names = ", ".join(unproven[:3]) + (" and others" if len(unproven) > 3 else "")
            detail += f"; nothing proves the names of {len(unproven)}: {names} (their versions have no keys)"
        if self._peers.outgoing.nameless(self._membership.name):
            detail += "; this node's certificate lacks its name, so only its key proves the name"
        if self._skipped:
            detail += f", {self._skipped} pings were not sent because too many were under way"
        return [SourceState("cluster", "degraded" if problems else "running", first_of(problems), detail=detail)]

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._make(self._membership.tick())
            await self._peers.close_idle()
            # If this process was paused, the missed ticks are skipped.
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

    async def _call(self, call: Call, seconds: float) -> bytes | None:
        """Makes ``call`` and the calls that follow from its outcome. Returns the proof of the node that the call is
        about; None if that node did not answer."""
        try:
            message, certified = await self._exchange(call, seconds)
        except (grpc.aio.AioRpcError, asyncio.TimeoutError, ProbingError) as e:
            _log.debug("%s at %s does not answer: %s", call.name, call.address, e)
            self._make(self._membership.unanswered(call))
            return None
        self._make(self._membership.answered(call, message, certified=certified))
        return message.proof if message.sender.name == call.name else None

    async def _exchange(self, call: Call, seconds: float) -> tuple[Message, bool]:
        """Returns the answer, and whether TLS proved that it came from the node that the call is about."""
        node, now = call.name, asyncio.get_running_loop().time()
        if self._may_prove(node, now):
            try:
                return await self._ask(call, seconds, node), True
            except grpc.aio.AioRpcError as e:
                if not lacks_name(e) or self._membership.proof_of(node) is Proof.CERTIFICATE:
                    raise
                if len(self._nameless) >= MAX_RESOLVED:
                    self._nameless.clear()
                self._nameless[node] = now
        return await self._ask(call, seconds, ""), False

    def _may_prove(self, node: str, now: float) -> bool:
        """Returns whether TLS should prove the name of ``node``: only if the certificates of this node and of ``node``
        are believed to contain the nodes' names.
        """
        if not self._peers.outgoing.may_check(node):
            return False
        named = self._named and now - self._nameless.get(node, -NAMELESS_S) >= NAMELESS_S
        return named or self._membership.proof_of(node) is Proof.CERTIFICATE

    async def _ask(self, call: Call, seconds: float, node: str) -> Message:
        request = pb.GossipRequest(message=packed(call.message))
        compression = grpc.Compression.Gzip if request.ByteSize() > COMPRESS_BYTES else None
        metadata = self._peers.metadata(call.address, node)
        async with self._peers.use(call.address, node) as stub:
            reply = await asyncio.wait_for(
                stub.Gossip(request, timeout=seconds, metadata=metadata, compression=compression), seconds
            )
        return message_of(reply.message, local=self._local)

    async def _resolve(self) -> None:
        while True:
            found: dict[str, None] = {}
            for seed in self._seeds:
                addresses = await self._addresses(seed) if seed.startswith(DNS) else [seed]
                found.update(dict.fromkeys(addresses))
            seeds = list(found)[:MAX_RESOLVED]
            if allowed := self._peers.outgoing.allowed:
                await allowed.set_seeds(seeds)
            self._membership.set_seeds(seeds)
            # If this node's certificate lacks its name, the nodes seem to share a certificate that does not name them.
            # TLS is then not asked to prove names: gRPC would log each missing name.
            self._named = not await asyncio.to_thread(self._peers.outgoing.nameless, self._membership.name)
            await asyncio.sleep(RESOLVE_S)

    async def _addresses(self, seed: str) -> list[str]:
        host, _, port = seed.removeprefix(DNS).rpartition(":")
        try:
            entries = await OF_NODES.entries(host, int(port))
        except OSError as e:
            self._unresolved[seed] = f"the name is not known: {e.strerror or e}"[:200]
            return []
        self._unresolved.pop(seed, None)
        hosts = [str(entry[4][0]) for entry in entries]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
