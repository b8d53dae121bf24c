"""Option types that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ("For", "Job", "Pids", "Rank", "Since", "Until", "Wide")

Job = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Only this job: its name, the end of its name, a run, or a pid of it."),
]
Rank = Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")]
Pids = Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="All if left out.")]
Since = Annotated[
    str, typer.Option(metavar="TIME", help="Where to begin: how far back, or an instant such as 13:05:12Z.")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Where to end, likewise; now if left out.")]
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="Take the change back after so long, such as 10m.")
]
Wide = Annotated[bool, typer.Option("-w", "--wide", help="All columns, however wide the terminal is.")]
