"""The calls to other nodes that the coordination needs. ``service`` implements them, by the membership and gRPC."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ("LIVING", "MAX_ADDRESSES", "Holder", "Holding", "PeerFacts", "Peers", "Sight", "job_mark", "plain_address")

MAX_ADDRESSES = 4096
"""The most addresses of each kind in a sight."""


class Holder(NamedTuple):
    """A node that claims to hold ranks of a job. ``living``: one of the ranks has not ended. ``failed``: the node does
    not answer. ``address``: the address that it gives, if that is an IP address."""

    node: str
    living: bool
    failed: bool
    address: str = ""


class PeerFacts(NamedTuple):
    """The facts of one job on a peer: for each run, JSON as ``probing.diagnosis.facts_file`` writes it.

    ``clock_offset_ns``: the peer's clock less ours, exact to ``clock_error_ns``.
    """

    parts: Sequence[bytes]
    clock_offset_ns: int
    clock_error_ns: int


class Sight(NamedTuple):
    """The connections of the ranks of a run on a node. ``addresses``: the addresses of the node's own ends; ``peers``:
    of the other ends. ``hosts``: the addresses at which its daemon answered by its name."""

    addresses: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()


class Holding(NamedTuple):
    """The ranks of a run on this node. ``calls``: recorded operations; while the number grows, the job advances.
    ``world_size``: 0 when not known. ``living``: a process of the ranks lives."""

    ranks: frozenset[int] = frozenset()
    world_size: int = 0
    calls: int = 0
    living: bool = False

    @property
    def whole(self) -> bool:
        """Whether all ranks of the run are on this node."""
        return 0 < self.world_size <= sum(0 <= rank < self.world_size for rank in self.ranks)


class Peers(Protocol):
    """Safe for many threads."""

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        """Returns the other nodes that claim to hold ranks of a run, or held ranks until lately."""

    def sight(self, node: str, job: str, run: str, timeout: float) -> Sight:
        """Returns the connections of the ranks of a run on a node, which has answered by its name within ``timeout``
        seconds. A node of an older version shows none. Raises ProbingError."""

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> PeerFacts:
        """Returns a node's facts of a run, within ``timeout`` seconds. Raises ProbingError."""

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """Stores rows of ``diagnosis.findings`` on a node. Raises ProbingError."""

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether such a rank lives."""


def plain_address(text: str | None) -> str:
    """Returns the usual form of an address; empty for loopback and link-local addresses, which many nodes have."""
    try:
        address = ipaddress.ip_address((text or "").strip("[]").partition("%")[0])
    except ValueError:
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    return "" if address.is_loopback or address.is_unspecified or address.is_link_local else str(address)


LIVING = 1
"""The bit of a mark that is set while a rank of the job lives on the node."""


def job_mark(job: str, run: str, *, living: bool) -> int:
    """Returns the mark of a run of a job: 64 bits of a hash, the lowest of them ``LIVING``."""
    text = f"{job}\0{run}".encode(errors="replace")
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return number & ~LIVING | (LIVING if living else 0)
