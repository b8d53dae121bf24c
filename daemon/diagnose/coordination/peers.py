"""What the coordination needs of other nodes. ``service`` implements it, with the membership and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ("Holder", "PeerFacts", "Peers")


class Holder(NamedTuple):
    """A node that holds ranks of a job. ``living``: one of them has not ended. ``failed``: it does not answer."""

    node: str
    living: bool
    failed: bool


class PeerFacts(NamedTuple):
    """The facts of one job on a peer: JSON as ``probing.diagnosis.facts_file`` writes it, one of each run.

    ``clock_offset_ns`` is the peer's clock less ours, exact to ``clock_error_ns``.
    """

    parts: Sequence[bytes]
    clock_offset_ns: int
    clock_error_ns: int


class Peers(Protocol):
    """Safe for many threads."""

    def holders(self, job: str, run: str) -> Sequence[Holder]:
        """Returns the other nodes that hold ranks of this run, or held them until lately."""

    def facts(self, node: str, job: str, *, run: str, deep: bool, timeout: float) -> PeerFacts:
        """Returns what a node knows of a run, within ``timeout`` seconds. Raises ProbingError."""

    def record(self, node: str, rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """Stores rows of ``diagnosis.findings`` on a node. Raises ProbingError."""

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether one of these lives."""
