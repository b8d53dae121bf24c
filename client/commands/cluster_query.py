"""``cluster query``: does the same as ``query``, on all nodes."""

from __future__ import annotations

from dataclasses import replace

from probing.client.commands import query
from probing.client.commands.query import EXAMPLES, Options
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "Options", "run")


def run(settings: Settings, options: Options) -> None:
    query.run(replace(settings, all_nodes=True), options)
