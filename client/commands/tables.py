"""``tables``: shows the tables that can be queried, or the columns of one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.table_docs import write_docs

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl tables", "probingctl tables comm.ops")


@dataclass(frozen=True, slots=True)
class Options:
    name: Annotated[str | None, typer.Argument(help="Show this table's columns.")] = None


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        write_docs(settings, cluster, options.name)
