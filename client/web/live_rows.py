"""A view of ``top`` as the events of the page: all jobs, or one job with its ranks in columns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from probing.api.text import utc
from probing.client.diagnosis.findings import numbers
from probing.client.render.rows import Row
from probing.client.top.model import View
from probing.client.top.trouble import Job
from probing.client.web.answers import Contract

__all__ = ("RANK_COLUMNS", "job_event", "jobs_event")

RANK_COLUMNS = (
    "node",
    "rank",
    "local_rank",
    "pid",
    "gpu",
    "state",
    "blame",
    "step",
    "steps_per_s",
    "step_age_ns",
    "lag_ns",
    "comm",
    "op",
    "seq",
    "age_ns",
    "collectives_per_s",
    "last_age_ns",
    "cpu_pct",
    "rss_bytes",
    "gpu_pct",
    "gpu_used_bytes",
    "gpu_total_bytes",
    "power_w",
    "temperature_c",
    "python",
    "waits_in",
    "away",
    "ended",
    "how",
    "first",
)
_FINDING = ("finding_id", "verdict", "severity", "sentence", "opened")
_MOST_JOBS = 1000
_MOST_NODES = 10_000
# The maximum number of ranks whose series are combined to the series of a job, and the maximum length of that series.
_MOST_SERIES = 64
_LONGEST = 60


def jobs_event(view: View, error: str) -> dict[str, object]:
    """Returns the data of the event ``jobs``; ``error``: why the last refresh failed, or empty."""
    notes = [*view.notes, *([error] if error else [])]
    if len(view.jobs) > _MOST_JOBS:
        notes.append(f"only the first {_MOST_JOBS:,} of {len(view.jobs):,} jobs are shown")
    return {
        "contract": _contract(view, error),
        "notes": notes,
        "jobs": [_job(job) for job in view.jobs[:_MOST_JOBS]],
    }


def job_event(view: View, error: str, name: str) -> dict[str, object]:
    """Returns the data of the event ``job`` for the first run of the job ``name``; ``job`` is null if no node has the
    job."""
    runs = [job for job in view.jobs if job.job == name]
    job = next(iter(runs), None)
    rows = [] if job is None else [_rank(row) for row in job.ranks]
    return {
        "contract": _contract(view, error),
        "notes": [*view.notes, *([error] if error else [])],
        "job": None if job is None else _job(job),
        "lines": [] if job is None else list(job.lines),
        "other_runs": [other.run for other in runs[1:]],
        "ranks": {"columns": list(RANK_COLUMNS), "rows": rows},
    }


def _contract(view: View, error: str) -> Contract:
    failures = [{"node": absent.node or absent.address, "error": absent.reason} for absent in view.absent]
    away = {absent.node for absent in view.absent}
    answered = sum(node not in away for node in view.nodes)
    return {
        "asked": answered + len(view.absent),
        "answered": 0 if error else answered,
        "failures": [*failures, *([{"node": "", "error": error}] if error else [])],  # type: ignore[list-item]
        "at": utc(time.time_ns() - (0 if view.at is None else round((time.monotonic() - view.at) * 1e9))),
        "lost_rows": None,
        "clock_error_ns": None,
    }


def _job(job: Job) -> Row:
    live = [row for row in job.ranks if row["ended"] is None]
    rates = [row["steps_per_s"] for row in live if row["steps_per_s"] is not None]
    worst = next(iter(job.findings), None)
    return {
        "job": job.job,
        "run": job.run,
        "state": job.word,
        "ended": job.ended,
        "ranks": job.live,
        "world_size": job.world,
        "nodes": sorted({str(row["node"]) for row in job.ranks})[:_MOST_NODES],
        # A step ends when its slowest rank ends it.
        "steps_per_s": min(rates, default=None),
        "steps_series": _series(live[:_MOST_SERIES]),
        "finding": None if worst is None else {**{name: worst[name] for name in _FINDING}, **_who(worst)},
    }


def _who(finding: Row) -> dict[str, list[int]]:
    return {"culprits": numbers(finding["ranks"]), "victims": numbers(finding["victims"])}


def _series(rows: Iterable[Row]) -> list[float | None]:
    """Returns the lowest rate of steps of ``rows`` at each of the last refreshes."""
    series: Sequence[Sequence[float | None]] = [row["history"]["steps_per_s"][-_LONGEST:] for row in rows]
    longest = max(map(len, series), default=0)
    found: list[float | None] = []
    for back in range(longest, 0, -1):
        values = [own[-back] for own in series if len(own) >= back]
        found.append(min((value for value in values if value is not None), default=None))
    return found


def _rank(row: Row) -> list[object]:
    own = {**row, "gpu": [gpu["device_id"] for gpu in row["gpus"]]}
    return [own.get(name) for name in RANK_COLUMNS]
