"""``ps``: shows the living training processes, or the processes that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import escape, sql_text
from probing.client.diagnosis.endings import MOST, ended, recent
from probing.client.diagnosis.findings import OPEN, Verdicts, open_by_run, verdict_lines
from probing.client.options import Wide
from probing.client.render.output import write_objects, write_rows
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, by_job, show_value, terminal_width, wrapped
from probing.client.session import job_named, notice_lines, opened, require_live, shown_pauses, warn
from probing.client.settings import Settings
from probing.client.times import Interval, interval
from probing.client.zone import clock

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.federation.execution.answer import Answer

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl ps --all-nodes", "probingctl ps --job 4711 --ended")


def _rank(value: object) -> str:
    return "-" if value is None else str(value)


_FIELDS = (
    Field("NODE", "node"),
    Field("ROLE", "role"),
    Field("RANK", "rank", _rank, right=True),
    Field("LOCAL", "local_rank", _rank, right=True),
    Field("WORLD", "world_size", _rank, right=True),
    Field("FROM", "rank_source", lambda v: show_value(v or None)),
    Field("PID", "pid", right=True),
    Field("STATE", "state"),
    Field("PYTHON", "python"),
    Field("BACKENDS", "backends", lambda v: show_value(v or None)),
    Field("COMMAND", "command", flex=True),
)
_SPARE = ("rank_source", "local_rank", "world_size", "python")
_NOBODY = "(no training process; `probingctl ps --ended` shows processes that have ended)\n"
_ENDED = (
    Field("NODE", "node"),
    Field("ROLE", "role"),
    Field("RANK", "rank", _rank, right=True),
    Field("PID", "pid", right=True),
    Field("ENDED", "ended", clock),
    Field("HOW", "how"),
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            "--group",
            metavar="JOB",
            help="Only this job or group: its name, the end of its name, its run, or one of its pids.",
        ),
    ] = None
    ended: Annotated[bool, typer.Option("--ended", help="Processes that have ended, the newest first.")] = False
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --ended: start, how long before now, or an instant; default: 1d."),
    ] = None
    until: Annotated[str | None, typer.Option(metavar="TIME", help="With --ended: the end, given as for --since.")] = (
        None
    )
    wide: Wide = False


def run(settings: Settings, options: Options) -> None:
    if not options.ended and (options.since is not None or options.until is not None):
        raise UsageError("--since and --until need --ended", hint="without --ended ps shows running processes")
    during = interval(options.since or "1d", options.until)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        where = "" if job is None else f"job = {sql_text(job)}"
        width = None if options.wide or settings.output is not None else terminal_width()
        if options.ended:
            rows = _ended(cluster, where or "true", during)
            write_objects(settings, rows, by_job(_ENDED, rows, width), rows)
            return
        as_table = settings.format == "table"
        answer, found = _asked(cluster, where) if as_table else (cluster.processes(where), None)
        if job is not None and not answer.table.num_rows:
            require_live(cluster, job)
        if found is not None:
            rows = rows_of(answer.table)
            above = shown_pauses(settings, notice_lines(cluster)) + _verdicts(rows, found, width)
            table = by_job(_FIELDS, rows, width, spare=_SPARE, empty=_NOBODY)
            write_objects(settings, rows, above + table, rows)
        else:
            write_rows(settings, answer.table)


def _asked(cluster: Cluster, where: str) -> tuple[Answer, Verdicts]:
    """Returns the processes and the open findings of their jobs, both from one request."""
    from probing.client.cluster import processes_sql

    statements = {"processes": processes_sql(where), "findings": OPEN.format(of_job=where or "true")}
    answers = cluster.answer_all(statements)
    return answers["processes"], open_by_run(rows_of(answers["findings"].table))


def _verdicts(rows: Sequence[Row], found: Verdicts, width: int | None) -> str:
    """Returns a line for each open finding of the jobs in ``rows``."""
    lines = [
        f"job {job}: {line}"
        for job, run in dict.fromkeys((row["job"], row["run"]) for row in rows)
        for line in verdict_lines(found.get((job, run), ()))
    ]
    return "".join(part + "\n" for line in lines for part in wrapped(escape(line), width))


def _ended(cluster: Cluster, where: str, during: Interval) -> list[Row]:
    """Returns rows of processes that have ended, the newest first."""
    rows = recent(ended(cluster, where, during))
    if len(rows) == MOST:
        warn(f"only the last {MOST:,} processes are shown: ask for less with --since")
    for row in rows:
        row["ended"], row["how"] = row.pop("ts"), row.pop("detail")
        del row["event"]
    return rows[::-1]
