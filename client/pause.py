"""``pause``: stop all probes at once, or let them run again."""

from __future__ import annotations

from probing.client.output import write_table
from probing.client.render import Field
from probing.client.session import opened
from probing.client.settings import Settings

__all__ = ("run",)


def run(settings: Settings, *, resume: bool) -> None:
    with opened(settings) as cluster:
        rows = [{"address": address, "paused": paused} for address, paused in cluster.pause(not resume)]
        write_table(settings, (Field("ADDRESS", "address"), Field("PAUSED", "paused")), rows)
