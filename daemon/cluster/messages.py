"""The messages between nodes (pings, their answers, and updates in both), and the calls that a tick returns."""

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

    ``digests``: a hash of each bucket of the sender's table, empty if tables are not compared. ``marks``: hashes of the
    sender's updates in ``buckets``; ``wanted``: the marks of updates in ``buckets`` that the sender lacks. ``relay``:
    the node that the receiver is asked to ping for the sender; ``reached``, in the answer: whether that node answered.

    ``nonce`` is random in a ping. In an answer, ``proof`` is the nonce signed by the sender, and ``relayed`` the nonce
    signed by the node ``relay``.
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
    # A ping of a seed, of a possible new address of a node, or of a node on request of another node.
    PROBE = "probe"
    REPAIR = "repair"


class Call(NamedTuple):
    """A message to ``address``, whose answer must come within ``seconds``. ``name``: the node that the call checks, or
    empty.

    ``turn``: the number of comparisons of tables with the called node that directly preceded this one.
    """

    purpose: Purpose
    name: str
    address: str
    message: Message
    seconds: float
    sent: float
    wall_ns: int
    turn: int = 0
