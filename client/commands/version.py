"""``version``: the version of this client, without asking a node."""

from __future__ import annotations

import sys

from probing.client.settings import Settings
from probing.client.version import program

__all__ = ("EXAMPLES", "run")

EXAMPLES = ("probingctl version",)


def run(_settings: Settings | None = None) -> None:
    sys.stdout.write(program() + "\n")
