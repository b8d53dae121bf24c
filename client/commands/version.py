"""``version``: of this client. Asks nobody."""

from __future__ import annotations

import sys
from importlib.metadata import version

__all__ = ("program", "run")


def run() -> None:
    sys.stdout.write(program() + "\n")


def program() -> str:
    """Name and version of this client."""
    return f"probingctl {version('probingd')}"
