"""What nodes answered in one refresh, and which nodes did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from probing.client.render.rows import Row

__all__ = ("Absent", "Fetched", "NodeRows", "merged")


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The rows of a node by question; a question that was not asked this time is missing. ``paused``: why, or empty."""

    address: str
    node: str
    rows: Mapping[str, list[Row]]
    paused: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """A node that does not answer. ``node`` is empty where its name was never known; ``since``: time.monotonic()."""

    address: str
    node: str
    reason: str
    since: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """One refresh; ``at`` is time.monotonic() when it was complete."""

    at: float
    nodes: tuple[NodeRows, ...] = ()
    absent: tuple[Absent, ...] = field(default=())


def merged(known: NodeRows | None, new: NodeRows) -> NodeRows:
    """Returns ``new`` with the rows of ``known`` for questions that were not asked this time."""
    return new if known is None else NodeRows(new.address, new.node, {**known.rows, **new.rows}, new.paused)
