"""Tables of processes: one where it fits the terminal, else one for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probing.client.render.rows import Row
from probing.client.render.table import Field, Grid, render
from probing.client.render.text import escape

__all__ = ("by_job",)

_JOB = (Field("JOB", "job", flex=True), Field("RUN", "run", flex=True))


def by_job(
    fields: Sequence[Field],
    rows: Sequence[Row],
    width: int | None,
    *,
    spare: Sequence[str] = (),
    nobody: str = "(none)\n",
) -> str:
    """Returns ``rows``, which have ``job`` and ``run``, as tables; ``fields`` are the other columns, with ``node``.

    Columns with the keys ``spare`` are left out where the table does not fit ``width`` cells; None: any width.
    ``nobody`` is the text for no rows.
    """
    bold = width is not None
    if not rows:
        return nobody
    place = [field.key for field in fields].index("node") + 1
    every = (*fields[:place], *_JOB, *fields[place:])
    if width is None or Grid(every, rows, width).width <= width:
        return render(every, rows, width, bold=bold)
    jobs: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        jobs.setdefault((row["job"], row["run"]), []).append(row)
    kept = [field for field in fields if field.key not in spare]
    return "\n".join(_head(*job) + render(kept, own, width, bold=bold) for job, own in jobs.items())


def _head(job: str | None, run: str | None) -> str:
    return escape(f"job {job or '-'}  run {run or '-'}") + "\n"
