"""``version``: of this client. Asks nobody."""

from __future__ import annotations

import sys
from importlib.metadata import version

__all__ = ("run",)


def run() -> None:
    sys.stdout.write(f"probingctl {version('probingd')}\n")
