"""Gossip as protobuf messages, checked when they come from a peer."""

from __future__ import annotations

from probing.api.errors import PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster.keys import NONCE_BYTES, SIGNATURE_BYTES
from probing.daemon.cluster.messages import MAX_BYTES, MAX_MARKS, MAX_UPDATES, Message
from probing.daemon.cluster.record import BUCKETS, Claim, Record, Update, checked_record

__all__ = ("message_of", "packed")


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
    """Returns the message. Raises PeerError for one that is out of bounds; ``local``: Unix sockets are addresses."""
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
