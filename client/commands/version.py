"""``version``: shows the version of this client, without asking a node."""

from __future__ import annotations

import sys

from probing.client.settings import Settings
from probing.client.version import program

__all__ = ("EXAMPLES", "run")

EXAMPLES = ("probingctl version",)


def run(settings: Settings | None = None) -> None:
    if settings is None or settings.format == "table":
        sys.stdout.write(program() + "\n")
        return
    from probing.client.render.output import write_objects

    name, number = program().split(" ", 1)
    row = {"program": name, "version": number}
    write_objects(settings, row, "", [row])
