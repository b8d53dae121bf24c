"""The members of the cluster for clients: rows of cluster.members, and Peers; and this node's own entry among them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.cluster import Member, Membership
from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.record import Record
from probing.daemon.cluster.view import Times
from probing.daemon.config import Config

__all__ = ("address_of", "member_rows", "membership_of", "packed_peer")

_ANY = ("", "0.0.0.0", "::")  # noqa: S104


def membership_of(config: Config, version: str) -> Membership:
    """Returns the membership of the node that ``config`` describes; its incarnation begins with the time."""
    cluster = config.cluster
    pairs = (label.partition("=") for label in cluster.labels)
    labels = tuple(sorted((key, value) for key, _, value in pairs))
    uid = secrets.randbits(63) + 1
    # Not imported: the service has no database.
    engine = metadata.version("duckdb")
    own = Record(config.node_name, address_of(config), int(time.time()), uid, labels, (), version, engine)
    times = Times(cluster.heartbeat_s, cluster.suspect_s, cluster.failed_s)
    return Membership(Machine(own, (), times), time.monotonic, time.time_ns)


def address_of(config: Config) -> str:
    """Returns where others reach the node: as it is configured, else where it listens."""
    if config.cluster.advertise or not config.listen:
        return config.cluster.advertise or f"unix:{config.public_socket}"
    host, _, port = config.listen.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _ANY else config.listen


def member_rows(members: Iterable[Member]) -> list[dict[str, Any]]:
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
        }
        for m in members
    ]


def packed_peer(member: Member) -> pb.Peer:
    return pb.Peer(
        node=member.name,
        address=member.address,
        state=member.state,
        labels=member.labels,
        since_ns=member.since_ns or 0,
        problem=member.problem,
    )
