"""The calls to other nodes that the coordination needs. ``service`` implements them with the membership and gRPC."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from probing.api.errors import PeerError, ProbingError

__all__ = (
    "LIVING",
    "MAX_ADDRESSES",
    "Holder",
    "Holding",
    "PeerFacts",
    "Peers",
    "Sight",
    "answers",
    "job_mark",
    "plain_address",
)

_MARGIN_S = 0.2
_T = TypeVar("_T")
MAX_ADDRESSES = 4096
"""The maximum number of addresses of each kind in a sight."""


class Holder(NamedTuple):
    """A node that claims to have ranks of a job. ``living``: at least one of its ranks has not ended. ``failed``: the
    node does not answer. ``address``: the IP address that it publishes, or empty."""

    node: str
    living: bool
    failed: bool
    address: str = ""


class PeerFacts(NamedTuple):
    """The facts of one job on another node: for each run, JSON in the form of ``probing.diagnosis.facts_file``.

    ``clock_offset_ns``: the peer's clock minus this node's clock, exact to ``clock_error_ns``.
    """

    parts: Sequence[bytes]
    clock_offset_ns: int
    clock_error_ns: int


class Sight(NamedTuple):
    """The connections of a run's ranks on a node. ``addresses``: their local addresses; ``peers``: their peer
    addresses. ``hosts``: the addresses at which the node's daemon answered by its name."""

    addresses: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()


class Holding(NamedTuple):
    """The ranks of a run on this node. ``calls``: the number of recorded operations; while it grows, the job advances.
    ``world_size``: 0 when not known. ``living``: a process of the run lives on this node."""

    ranks: frozenset[int] = frozenset()
    world_size: int = 0
    calls: int = 0
    living: bool = False

    @property
    def whole(self) -> bool:
        """Whether all ranks of the run are on this node."""
        return 0 < self.world_size <= sum(0 <= rank < self.world_size for rank in self.ranks)


class Peers(Protocol):
    """The calls to other nodes. Thread-safe. A call to a node returns a future at once, so that all nodes of a job can
    be called at the same time. The future has the answer, or raises ProbingError, within ``timeout`` seconds or little
    more.
    """

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        """Returns the other nodes that claim to have ranks of a run, or had ranks until lately."""

    def sight(self, node: str, job: str, run: str, timeout: float) -> Future[Sight]:
        """Asks a node which connections of the run's ranks it sees. The node must answer by its own name. A node of an
        older version shows no connections.
        """

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> Future[PeerFacts]:
        """Asks for the facts that a node has of a run."""

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> Future[None]:
        """Stores rows of ``diagnosis.findings`` on a node."""

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether a rank of each still lives."""


def answers(calls: Mapping[str, Future[_T]], timeout: float) -> dict[str, _T | ProbingError]:
    """Returns the answer of each node, or the error of its call. ``calls``: by node; calls that last longer than
    ``timeout`` seconds are cancelled.
    """
    wait(calls.values(), timeout + _MARGIN_S)
    outcomes: dict[str, _T | ProbingError] = {}
    for node, call in calls.items():
        if not call.done():
            call.cancel()
            outcomes[node] = PeerError(f"no answer within {timeout:.1f} s")
            continue
        try:
            outcomes[node] = call.result()
        except ProbingError as e:
            outcomes[node] = e
    return outcomes


@lru_cache(MAX_ADDRESSES)
def plain_address(text: str | None) -> str:
    """Returns an address in its usual form; empty for loopback and link-local addresses, which many nodes share."""
    try:
        address = ipaddress.ip_address((text or "").strip("[]").partition("%")[0])
    except ValueError:
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    return "" if address.is_loopback or address.is_unspecified or address.is_link_local else str(address)


LIVING = 1
"""The bit of ``job_mark`` that is set while a rank of the run lives on the node."""


def job_mark(job: str, run: str, *, living: bool) -> int:
    """Returns 64 bits that identify a run of a job: a hash, whose lowest bit is replaced by ``living``."""
    text = f"{job}\0{run}".encode(errors="replace")
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return number & ~LIVING | (LIVING if living else 0)
