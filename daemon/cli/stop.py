"""``probingd stop``."""

from __future__ import annotations

from typing import Annotated

import typer

from probing.daemon.cli.options import config_of
from probing.daemon.supervisor import control

__all__ = ("command",)


def command(
    context: typer.Context,
    keep_pins: Annotated[bool, typer.Option("--keep-pins", help="Leave the probes for the next start.")] = False,
) -> int:
    """End the daemon and remove its probes."""
    control.stop(config_of(context), keep_pins=keep_pins)
    return 0
