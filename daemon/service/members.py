"""Makes the messages and rows about members of the cluster, for Peers and cluster.members, and this node's record."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Container, Iterable
from importlib import metadata

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables.schema import Row
from probing.daemon.cluster import Member, Membership
from probing.daemon.cluster.keys import NodeKey
from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.record import Proof, Record
from probing.daemon.cluster.view import Times
from probing.daemon.config import Config
from probing.daemon.service.outgoing import Known

__all__ = ("address_of", "known_at", "member_rows", "membership_of", "packed_peer")

_ANY = ("", "0.0.0.0", "::")  # noqa: S104


def membership_of(config: Config, version: str, key: NodeKey | None = None) -> Membership:
    """Returns the membership of the node that ``config`` describes; its incarnation starts with the present time.
    ``key`` signs the node's record."""
    cluster = config.cluster
    pairs = (label.partition("=") for label in cluster.labels)
    labels = tuple(sorted((key, value) for key, _, value in pairs))
    uid = secrets.randbits(63) + 1
    # The version is read from the package's metadata, without importing duckdb: the service has no database.
    engine = metadata.version("duckdb")
    own = Record(config.node_name, address_of(config), int(time.time()), uid, labels, (), version, engine)
    times = Times(cluster.heartbeat_s, cluster.suspect_s, cluster.failed_s)
    return Membership(Machine(own, (), times, key=key), time.monotonic, time.time_ns)


def address_of(config: Config) -> str:
    """Returns the address at which other nodes reach this node: as configured, else the address on which it listens."""
    if config.cluster.advertise or not config.listen:
        return config.cluster.advertise or f"unix:{config.public_socket}"
    host, _, port = config.listen.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _ANY else config.listen


def known_at(membership: Membership, address: str) -> Known:
    """Returns what the membership knows about the node at ``address``."""
    found = membership.at(address)
    if found is None:
        return Known()
    return Known(found.name, found.proof == Proof.CERTIFICATE.word, found.keyed)


def member_rows(members: Iterable[Member]) -> list[Row]:
    """Returns rows of cluster.members."""
    return [
        {
            "member": m.name,
            "address": m.address,
            "state": m.state,
            "version": m.version or None,
            "since": m.since_ns,
            "incarnation": m.incarnation,
            "labels": ",".join(f"{key}={value}" for key, value in sorted(m.labels.items())),
            "engine": m.engine or None,
            "heard_ns": m.heard_ns,
            "rtt_ns": m.rtt_ns,
            "clock_offset_ns": m.clock_offset_ns,
            "problem": m.problem or None,
            "proof": m.proof or None,
        }
        for m in members
    ]


def packed_peer(member: Member, named: Container[str] = ()) -> pb.Peer:
    """Returns ``member`` as a message for Peers. ``named``: addresses that the administrator of this node named."""
    return pb.Peer(
        node=member.name,
        address=member.address,
        state=member.state,
        labels=member.labels,
        since_ns=member.since_ns or 0,
        problem=member.problem,
        proof=member.proof,
        bound=member.keyed,
        named=member.address in named,
    )
