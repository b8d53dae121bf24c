"""Nodes whose probes are paused: shown above tables, because newer rows are missing there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from probing.api.text import escape
from probing.client.session import warn
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("pause_lines", "shown_pauses")


def pause_lines(cluster: Cluster) -> dict[str, str]:
    """Returns a line for each node whose probes are paused, by node."""
    return {
        reply.node: f"PAUSED on {reply.node}{reply.reason.removeprefix('paused')}: nothing newer is seen"
        for _, reply in cluster.status()
        if reply.state == "paused"
    }


def shown_pauses(settings: Settings, lines: Mapping[str, str]) -> str:
    """Returns ``lines`` as text above a table; for other formats it writes them as warnings and returns nothing."""
    if settings.format == "table":
        return "".join(escape(line) + "\n" for line in lines.values())
    for line in lines.values():
        warn(line)
    return ""
