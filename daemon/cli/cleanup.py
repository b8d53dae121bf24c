"""``probingd cleanup``."""

from __future__ import annotations

from typing import Annotated

import typer

from probing.daemon.cli.options import config_of
from probing.daemon.supervisor import control

__all__ = ("command",)


def command(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Remove the probes of all instances.")] = False,
) -> int:
    """Remove the probes that a daemon left behind: those of --instance NAME, or with --all everyone's."""
    control.cleanup(config_of(context), everything=everything)
    return 0
