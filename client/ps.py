"""``ps``: the training processes."""

from __future__ import annotations

from probing.client.cluster import ps_sql
from probing.client.output import write_rows
from probing.client.render import Field, show_value
from probing.client.session import job_named, opened, require_job, sql_text, warn
from probing.client.settings import Settings

__all__ = ("run",)


def _rank(value: object) -> str:
    return "-" if value is None else str(value)


_FIELDS = (
    Field("NODE", "node"),
    Field("JOB", "job", flex=True),
    Field("RUN", "run", flex=True),
    Field("ROLE", "role"),
    Field("RANK", "rank", _rank, right=True),
    Field("LOCAL", "local_rank", _rank, right=True),
    Field("WORLD", "world_size", _rank, right=True),
    Field("PID", "pid", right=True),
    Field("STATE", "state"),
    Field("PYTHON", "python"),
    Field("BACKENDS", "backends", lambda v: show_value(v or None)),
    Field("COMMAND", "command", flex=True),
)


def run(settings: Settings, job: str | None) -> None:
    with opened(settings) as cluster:
        job = job_named(cluster, job)
        answer = cluster.answer(ps_sql("" if job is None else f"job = {sql_text(job)}"))
        if job is not None and not answer.table.num_rows:
            require_job(cluster, job)
        write_rows(settings, answer.table, _FIELDS)
        for warning in answer.warnings:
            warn(warning)
