"""The messages between nodes: pings and their answers, with updates; and the calls that a tick returns."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from probing.daemon.cluster.record import Record, Update

__all__ = ("MAX_BYTES", "MAX_MARKS", "MAX_UPDATES", "Call", "Message", "Purpose")

# Limits of one message; the receiver refuses larger messages.
MAX_BYTES = 16_000
MAX_UPDATES = 256
MAX_MARKS = 256


class Message(NamedTuple):
    """A ping, or the answer to a ping. ``wall_ns``: the sender's clock.

    ``digests``: a hash of each bucket of the sender's table, empty if tables are not compared. ``buckets``: the buckets
    whose ``marks`` of updates the sender lists; ``wanted``: the marks of updates that the sender asks for. ``relay``:
    the node that the receiver is asked to ping for the sender; ``reached``, in the answer: that node answered.

    ``nonce`` is random in a ping; ``proof`` answers the nonce by the key of the sender, and ``relayed`` by the key of
    the node that was pinged for the asking node.
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
    # A ping of an address that may be a node's new address or a seed's, or a ping for another node that asked for it.
    PROBE = "probe"
    REPAIR = "repair"


class Call(NamedTuple):
    """A message to ``address`` whose answer must come within ``seconds``. ``name``: the node that the call is about, or
    empty.

    ``turn``: the number of comparisons with the called node in direct succession.
    """

    purpose: Purpose
    name: str
    address: str
    message: Message
    seconds: float
    sent: float
    wall_ns: int
    turn: int = 0
