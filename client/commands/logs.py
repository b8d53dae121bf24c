"""``logs``: lines that trainers wrote to stdout and stderr, as far as they were stored."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from probing.api.errors import NotFound, UsageError
from probing.client.cluster import Cluster
from probing.client.render.output import write_objects
from probing.client.render.rows import dump_line, rows_of
from probing.client.render.text import escape
from probing.client.session import job_named, opened, require_job, sql_text, warn
from probing.client.settings import Settings

__all__ = ("Filter", "collect", "followed", "people", "run")

MOST_LINES = 10_000
FOLLOW_S = 1.0
# How much later than its own time a row may come: it waits on its way to the log, and clocks differ.
LATE_S = 60.0
_LINES = """
SELECT node, ts, epoch_ns(ts) AS t, job, run, rank, pid, tid, stream, kind, line, suppressed
FROM process.logs WHERE {where} ORDER BY ts DESC LIMIT {limit}
"""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which lines: of a job, of a rank, of a kind (part of it is enough, in any case)."""

    job: str | None
    rank: int | None
    kind: str | None

    def lately(self, since: float) -> str:
        """The condition for the last ``since`` seconds."""
        conditions = [] if self.job is None else [f"job = {sql_text(self.job)}"]
        conditions += [] if self.rank is None else [f"rank = {self.rank}"]
        conditions += [] if self.kind is None else [f"contains(lower(kind), {sql_text(self.kind.lower())})"]
        return " AND ".join([*conditions, f"ts > now() - INTERVAL {max(1, round(since))} SECOND"])


def run(settings: Settings, chosen: Filter, since: float, *, follow: bool) -> None:
    if follow and settings.format not in ("table", "jsonl"):
        raise UsageError("--follow writes tables or -f jsonl only")
    if follow and settings.output is not None:
        raise UsageError("--follow writes to stdout", hint="redirect it with > FILE")
    with opened(settings) as cluster:
        chosen = replace(chosen, job=job_named(cluster, chosen.job))
        found = collect(cluster, chosen, since)
        if not found and chosen.job is not None:
            require_job(cluster, chosen.job)
        if not found and not follow and settings.format == "table" and not _enabled(cluster):
            warn("lines are not collected: `probingctl config logs.enabled=true` switches that on, --job for one job")
        if len(found) == MOST_LINES:
            warn(f"only the last {MOST_LINES:,} lines are shown")
        if not follow:
            write_objects(settings, found, people(found, since), found)
            return
        for rows in followed(cluster, chosen, found):
            sys.stdout.write("".join(dump_line(rows)) if settings.format == "jsonl" else _lines(rows))
            sys.stdout.flush()


def collect(cluster: Cluster, chosen: Filter, since: float) -> list[Row]:
    """The lines in the order of their time, as docs/json.md describes; the last ones where there are too many."""
    rows = rows_of(cluster.query(_LINES.format(where=chosen.lately(since), limit=MOST_LINES)))
    rows.sort(key=lambda row: (row["t"], row["node"], row["pid"], row["tid"]))
    return [{name: value for name, value in row.items() if name != "t"} for row in rows]


def followed(cluster: Cluster, chosen: Filter, found: Sequence[Row]) -> Iterator[list[Row]]:
    """``found``, and from then on what is new. Ends with an error only."""
    yield list(found)
    seen = {_identity(row) for row in found}
    while True:
        time.sleep(FOLLOW_S)
        rows = collect(cluster, chosen, LATE_S)
        yield [row for row in rows if _identity(row) not in seen]
        # What is older than that does not come again.
        seen = {_identity(row) for row in rows} | (seen if len(rows) == MOST_LINES else set())


def people(found: Sequence[Row], since: float) -> str:
    """One line of text for each, with time, rank and stream."""
    return _lines(found) or f"(no line was stored in the last {round(since):,} s)\n"


def _lines(rows: Sequence[Row]) -> str:
    return "".join(f"{escape(_line(row))}\n" for row in rows)


def _line(row: Row) -> str:
    rank = "rank ?" if row["rank"] is None else f"rank {row['rank']}"
    left_out = f"  ({row['suppressed']:,} such lines before it were left out)" if row["suppressed"] else ""
    # Hours to milliseconds; the day is in the other formats.
    return f"{row['ts'][11:23]} {rank} {row['stream'] or '?'}: {row['line']}{left_out}"


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("node", "ts", "pid", "tid", "stream", "line"))


def _enabled(cluster: Cluster) -> bool:
    try:
        return any(setting["value"] == "true" for setting in cluster.config("logs.enabled"))
    except NotFound:
        # A daemon that cannot switch it on: no advice is better than a wrong one.
        return True
