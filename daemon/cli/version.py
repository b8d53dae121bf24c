"""``probingd version``."""

from __future__ import annotations

import sys
from importlib.metadata import version

import typer

from probing.api.errors import UsageError

__all__ = ("command", "show")


def command(context: typer.Context) -> int:
    """Print the version."""
    if context.args:
        raise UsageError("version takes no arguments")
    show()
    return 0


def show() -> None:
    sys.stdout.write(f"probingd {version('probingd')}\n")
