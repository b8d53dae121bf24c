"""``probingd restart``."""

from __future__ import annotations

import typer

from probing.daemon.cli.options import config_of
from probing.daemon.supervisor import control

__all__ = ("command",)


def command(context: typer.Context) -> int:
    """Read the configuration again and restart the collector and the service; probes stay in place meanwhile."""
    control.restart(config_of(context))
    return 0
