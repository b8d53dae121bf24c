"""``annotate``: sets labels of the ranks of a job, such as the phase that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.client.options import Job, Rank
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import job_named, opened
from probing.client.settings import Settings, process_id

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = (
    "probingctl annotate --job 4711 phase=checkpoint --all-nodes",
    "probingctl annotate --job 4711 phase= --all-nodes",
    "probingctl annotate --job 4711 --rank 0 team=vision",
)
_EXAMPLE = "for example: probingctl annotate --job 4711 phase=eval"


@dataclass(frozen=True, slots=True)
class Options:
    """``words`` are labels KEY=VALUE, and pids."""

    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PID]... KEY=VALUE...", help="Labels; KEY= removes a label."),
    ] = None
    job: Job = None
    rank: Rank = None


def run(settings: Settings, options: Options) -> None:
    words = options.words or []
    labels = dict(word.split("=", 1) for word in words if "=" in word)
    pids = [process_id(word) for word in words if "=" not in word]
    if not labels:
        raise UsageError("there is no label to set", hint=_EXAMPLE)
    if not pids and options.job is None:
        raise UsageError("annotate needs the ranks to label", hint="give --job JOB or a pid")
    with opened(settings) as cluster:
        job = job_named(cluster, options.job or "")
        rows = [
            {"node": node, "ranks": ranks} for node, ranks in cluster.annotate(labels, pids, job, rank=options.rank)
        ]
    write_table(settings, (Field("NODE", "node"), Field("RANKS", "ranks")), rows)
