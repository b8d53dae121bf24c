"""Finds jobs by name: which job ``--job`` means, and the error for a job that is unknown or has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from probing.api.errors import NotFound, ProbingError, UsageError
from probing.api.text import names_owner, sql_text
from probing.client.absence import partial
from probing.client.render.rows import rows_of
from probing.client.zone import when

if TYPE_CHECKING:
    from probing.client.queries import Queries

__all__ = ("ended_error", "has_ended", "job_named", "require_live", "silent_nodes")

_MaybeText = TypeVar("_MaybeText", str, str | None)
# Tables with a column ``job``, in the order of the search: the first has the running jobs, the last has jobs that are
# known only from findings.
_JOB_TABLES = ("process.processes", "process.events", "comm.communicators", "diagnosis.findings")
_MOST_CANDIDATES = 8
_STATE = {
    "live": "SELECT count(*) AS processes FROM process.processes WHERE state <> 'exited' AND job = {job}",
    "ended": "SELECT max(ts) AS ended FROM process.events WHERE event = 'exit' AND job = {job}",
}


def job_named(cluster: Queries, text: _MaybeText) -> _MaybeText:
    """Returns the job that ``text`` names: by the name, the end of the name, a Slurm id without step, a run, or a pid.

    Raises NotFound if no node knows such a job, PartialAnswer if a node that does not answer may know it, and
    UsageError if several jobs fit.
    """
    if not text:
        return text
    name = sql_text(text)
    where = f"job = {name} OR run = {name} OR suffix(job, {name}) OR starts_with(job, {sql_text(text + '.')})"
    asked = len(cluster.outcomes)
    for place, table in enumerate(_JOB_TABLES, 1):
        by_pid = f" OR pid = {int(text)}" if table != "diagnosis.findings" and _is_pid(text) else ""
        answers = cluster.query_each(f"SELECT DISTINCT job FROM {table} WHERE {where}{by_pid}", ("job",))
        jobs = sorted({str(job) for answer in answers for job in answer.column(0).to_pylist() if job})
        if text in jobs or (jobs and _is_elsewhere(cluster, text, jobs, _JOB_TABLES[place:])):
            return text
        # A name with an owner belongs to another user's job of the same name, so names without an owner are preferred.
        jobs = [job for job in jobs if not names_owner(job)] or jobs
        if len(jobs) == 1:
            return jobs[0]
        if jobs:
            more = f" and {len(jobs) - _MOST_CANDIDATES} more" if len(jobs) > _MOST_CANDIDATES else ""
            fitting = ", ".join(jobs[:_MOST_CANDIDATES])
            raise UsageError(f"{text} fits several jobs: {fitting}{more}", hint="give the whole name, or a run")
    if silent := silent_nodes(cluster, asked):
        raise partial(f"job {text} was not found", silent)
    if group := _group_text(cluster, name):
        raise NotFound(f"group {text} has no processes: {group}", hint=f"probingctl group status {text}")
    raise NotFound(f"there is no job {text}", hint="`probingctl ps` lists the jobs that run now")


def _is_elsewhere(cluster: Queries, text: str, jobs: Sequence[str], tables: Sequence[str]) -> bool:
    """Returns whether ``text`` is the whole name of a job in ``tables``, such as a job that has ended. ``jobs`` were
    found in earlier tables, where ``text`` is only the end of the name, the run, or a pid of each job.
    """
    # A Slurm job id whose steps were found refers to those steps, so no other table is searched.
    if not tables or any(job.startswith(f"{text}.") for job in jobs):
        return False
    statements = {table: f"SELECT job FROM {table} WHERE job = {sql_text(text)} LIMIT 1" for table in tables}
    return any(answer.num_rows for answer in cluster.query_all(statements, each=statements).values())


def _group_text(cluster: Queries, name: str) -> str:
    """Returns a text with the phase of the group ``name`` (an SQL literal), and the reason; empty if there is no such
    group.
    """
    sql = f"SELECT phase, coalesce(waits_for, reason) AS why FROM cluster.groups WHERE group_name = {name}"
    try:
        answers = cluster.query_each(f"{sql} ORDER BY generation DESC LIMIT 1", ("phase", "why"))
        rows = [row for answer in answers for row in rows_of(answer)]
    except ProbingError:
        # An older node, which has no groups, lacks the table.
        return ""
    return f"it is {rows[0]['phase']}, {rows[0]['why'] or 'and was never started'}" if rows else ""


def _is_pid(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def silent_nodes(cluster: Queries, asked: int = 0, *, besides: tuple[type[Exception], ...] = ()) -> dict[str, str]:
    """Returns the nodes that did not answer, with the reasons: nodes in ``cluster.absent``, and nodes that failed in
    the outcomes from index ``asked`` on.

    ``besides``: classes of errors that count as answers.
    """
    failures = [*cluster.absent, *(failed for outcome in cluster.outcomes[asked:] for failed in outcome.failed)]
    return {f.node or f.address: f.reason for f in failures if not isinstance(f.error, besides)}


def ended_error(job: str, ended: str | None) -> NotFound:
    """Returns the error for a job without living processes. ``ended`` is the time when the job ended, UTC; None if it
    is unknown.
    """
    hint = f"`probingctl ps --ended --job {job}` shows how, `probingctl diagnose --job {job}` what was found until then"
    return NotFound(f"job {job} ended at {when(ended)}" if ended else f"job {job} has ended", hint=hint)


def has_ended(cluster: Queries, job: str) -> NotFound | None:
    """Returns ``ended_error`` if no process of ``job`` runs, else None."""
    found = cluster.query_all({name: sql.format(job=sql_text(job)) for name, sql in _STATE.items()})
    (live,), (ended,) = (rows_of(found[name]) for name in _STATE)
    return None if live["processes"] else ended_error(job, ended["ended"])


def require_live(cluster: Queries, job: str) -> None:
    """Raises NotFound if no process of ``job`` runs, so that an empty answer has an explanation."""
    if (error := has_ended(cluster, job)) is not None:
        raise error
