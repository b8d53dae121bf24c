"""``flamegraph``: does the same as ``profile``, but writes an SVG file."""

from __future__ import annotations

from dataclasses import replace

from probing.client.commands import profile
from probing.client.commands.profile import Options
from probing.client.settings import Settings, check_suffix

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl flamegraph --job 4711 --since 10m -o job.svg",)


def run(settings: Settings, options: Options) -> None:
    if options.kind is None:
        check_suffix(settings.output, (".svg",))
    profile.run(settings, replace(options, kind=options.kind or "svg"))
