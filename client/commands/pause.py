"""``pause``: stop all probes at once, or let them run again."""

from __future__ import annotations

from collections.abc import Mapping

from probing.client.cluster import Cluster
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.render.text import escape
from probing.client.session import opened, warn
from probing.client.settings import Settings

__all__ = ("head", "pauses", "run")


def run(settings: Settings, *, resume: bool) -> None:
    with opened(settings) as cluster:
        rows = [{"address": address, "paused": paused} for address, paused in cluster.pause(not resume)]
        write_table(settings, (Field("ADDRESS", "address"), Field("PAUSED", "paused")), rows)


def pauses(cluster: Cluster) -> dict[str, str]:
    """A line for each node whose probes are paused, by node."""
    return {
        reply.node: f"PAUSED on {reply.node}{reply.reason.removeprefix('paused')}: nothing newer is seen"
        for _, reply in cluster.status()
        if reply.state == "paused"
    }


def head(settings: Settings, paused: Mapping[str, str]) -> str:
    """``paused`` as text above a table; as warnings where the format is none for people."""
    if settings.format == "table":
        return "".join(escape(line) + "\n" for line in paused.values())
    for line in paused.values():
        warn(line)
    return ""
