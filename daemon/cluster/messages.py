"""What nodes say to each other: a ping or its answer, with updates, and the calls that a tick asks for."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from probing.daemon.cluster.record import Record, Update

__all__ = ("MAX_BYTES", "MAX_MARKS", "MAX_UPDATES", "Call", "Message", "Purpose")

# Of one message. The receiver refuses more.
MAX_BYTES = 16_000
MAX_UPDATES = 256
MAX_MARKS = 256


class Message(NamedTuple):
    """A ping, or the answer to one. ``wall_ns``: clock of the sender.

    ``digests``: a hash of each bucket of the sender's table, none where they are not compared. ``buckets`` are those
    whose ``marks`` of updates the sender lists; ``wanted`` the marks of updates that it asks for. ``relay`` names the
    node that the receiver shall ping in its place, and ``reached`` answers that.

    ``nonce`` is random in a ping; ``proof`` answers it by the key of the sender, and ``relayed`` by that of the node
    that was pinged in its place.
    """

    sender: Record
    wall_ns: int
    updates: tuple[Update, ...] = ()
    digests: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    relay: str = ""
    reached: bool = False
    nonce: bytes = b""
    proof: bytes = b""
    relayed: bytes = b""


class Purpose(Enum):
    PING = "ping"
    RELAY = "relay"
    # About an address that may be a node's new one, or a seed's.
    PROBE = "probe"
    REPAIR = "repair"


class Call(NamedTuple):
    """A message to ``address``, to be answered within ``seconds``. ``name``: of the node that it is about, or empty.

    ``turn`` counts the comparisons with this node that followed each other at once.
    """

    purpose: Purpose
    name: str
    address: str
    message: Message
    seconds: float
    sent: float
    wall_ns: int
    turn: int = 0
