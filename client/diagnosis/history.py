"""``diagnose --history``: earlier findings, also of jobs that have ended."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from probing.client.diagnosis.findings import PARTS, newest_sql, parsed
from probing.client.diagnosis.outcome import confidence_word
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import terminal_width
from probing.client.render.text import age, escape, when, wrapped
from probing.client.session import sql_text, warn
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("history", "show")

_MOST = 1000
_LINE = (
    "node",
    "verdict",
    "severity",
    "state",
    "confidence",
    "sentence",
    "ranks",
    "nodes",
    "victims",
    "about",
    "since",
    "opened",
    "closed",
)


def show(settings: Settings, cluster: Cluster, job: str | None, since: float) -> None:
    """Writes the findings of the last ``since`` seconds, oldest first. Raises NotFound for an unknown job."""
    rows = history(cluster, job, since, whole=settings.format in ("json", "jsonl"))
    width = terminal_width() if settings.output is None else None
    text = "".join(line + "\n" for row in rows for line in wrapped(escape(_line(row)), width))
    of_job = f" of job {job}" if job is not None else ""
    nothing = escape(f"(nothing was found{of_job} in the last {age(since * 1e9)})") + "\n"
    write_objects(settings, rows, text or nothing, rows)


def history(cluster: Cluster, job: str | None, since: float, *, whole: bool) -> list[Row]:
    """Returns the newest row of at most 1,000 findings, the oldest first; ``whole``: with the columns PARTS."""
    where = f"ts > now() - INTERVAL {max(1, round(since))} SECOND"
    where += "" if job is None else f" AND job = {sql_text(job)}"
    columns = (*_LINE, *PARTS) if whole else _LINE
    sql = f"{newest_sql(where, columns)} ORDER BY ts DESC LIMIT {_MOST}"
    rows = rows_of(cluster.query(sql))
    if len(rows) == _MOST:
        warn(f"only the newest {_MOST:,} are shown: ask for less with --since or --job")
    for row in rows:
        if row["state"] == "open":
            row["closed"] = None
        row.update({name: parsed(row[name]) for name in PARTS if name in row})
    return sorted(rows, key=lambda row: str(row["opened"]))


def _line(row: Row) -> str:
    lasted = _lasted(row)
    sure = confidence_word(row["confidence"] or 0.0)
    return f"{when(row['opened'])} {lasted}  job {row['job']}: {row['sentence']} ({row['verdict']}, {sure} confidence)"


def _lasted(row: Row) -> str:
    if row["state"] == "open":
        return "still open"
    if row["opened"] is None or row["closed"] is None:
        return "closed"
    opened, closed = (datetime.fromisoformat(row[name][:26]) for name in ("opened", "closed"))
    return f"for {age(max(0.0, (closed - opened).total_seconds()) * 1e9)}"
