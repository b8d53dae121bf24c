"""``cluster list``: does the same as ``ps``, on all nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from probing.client.commands import ps
from probing.client.options import Job, Wide
from probing.client.settings import Settings

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl cluster list --job 4711",)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    wide: Wide = False


def run(settings: Settings, options: Options) -> None:
    ps.run(replace(settings, all_nodes=True), ps.Options(job=options.job, wide=options.wide))
