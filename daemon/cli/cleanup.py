"""``probingd cleanup``."""

from __future__ import annotations

import sys
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
    config = config_of(context)
    removed = control.cleanup(config, everything=everything)
    whose = "" if everything else f" of instance {config.instance}"
    sys.stdout.write(f"the probes{whose} are removed\n" if removed else f"there were no probes{whose}\n")
    return 0
