"""``pause``: stops all probes at once, or lets them run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import opened
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl pause", "probingctl pause --resume")


@dataclass(frozen=True, slots=True)
class Options:
    resume: Annotated[bool, typer.Option("--resume", help="Let the probes run again.")] = False


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        rows = [{"address": address, "paused": paused} for address, paused in cluster.pause(not options.resume)]
        write_table(settings, (Field("ADDRESS", "address"), Field("PAUSED", "paused")), rows)
