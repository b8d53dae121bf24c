"""Option types that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ("For", "Job", "Pids", "Rank", "Since", "Until", "Wide")

Job = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Only this job: its name, the end of its name, its run, or one of its pids."),
]
Rank = Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")]
Pids = Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="Only these processes; default: all.")]
Since = Annotated[
    str, typer.Option(metavar="TIME", help="Start: how long before now, or an instant such as 13:05:12Z.")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="The end, given as for --since; default: now.")]
For = Annotated[str | None, typer.Option("--for", metavar="TIME", help="Undo the change after this time, such as 10m.")]
Wide = Annotated[bool, typer.Option("-w", "--wide", help="All columns, however wide the terminal is.")]
