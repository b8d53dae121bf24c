"""``nodes``: the nodes that the target knows, itself included."""

from __future__ import annotations

from probing.client.render.output import write_rows
from probing.client.render.table import Field
from probing.client.session import opened
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "run")

EXAMPLES = ("probingctl nodes",)
_SQL = """
SELECT node, member, address, state, version, ts FROM cluster.members ORDER BY node, member, address
"""
_FIELDS = (
    Field("NODE", "member"),
    Field("ADDRESS", "address"),
    Field("STATE", "state"),
    Field("VERSION", "version"),
    Field("SAYS", "node"),
)


def run(settings: Settings) -> None:
    with opened(settings) as cluster:
        write_rows(settings, cluster.query(_SQL), _FIELDS)
