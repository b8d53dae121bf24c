"""``events``: shows starts, exits and kills of the processes of jobs."""

from __future__ import annotations

from dataclasses import dataclass

from probing.api.text import sql_text
from probing.client.diagnosis.endings import MOST, events
from probing.client.options import Job, Since, Until
from probing.client.render.output import write_objects
from probing.client.render.table import Field, by_job, terminal_width
from probing.client.session import job_named, opened, warn
from probing.client.settings import Settings
from probing.client.times import interval
from probing.client.zone import clock

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl events --job 4711 --since 2h",)
_FIELDS = (
    Field("WHEN", "ts", clock),
    Field("NODE", "node"),
    Field("RANK", "rank", right=True),
    Field("PID", "pid", right=True),
    Field("EVENT", "event"),
    Field("DETAIL", "detail"),
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    since: Since = "1d"
    until: Until = None


def run(settings: Settings, options: Options) -> None:
    during = interval(options.since, options.until)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        rows = events(cluster, "true" if job is None else f"job = {sql_text(job)}", during)
        if len(rows) == MOST:
            warn(f"only the last {MOST:,} events are shown: ask for a job, or for less with --since")
        width = terminal_width() if settings.output is None else None
        write_objects(settings, rows, by_job(_FIELDS, rows, width), rows)
