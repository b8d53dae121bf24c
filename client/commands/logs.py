"""``logs``: shows stored lines that trainers wrote to stdout and stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probing.api.errors import NotFound, UsageError
from probing.api.text import escape, sql_text
from probing.client.jobs import silent_nodes
from probing.client.options import Job, Rank, Since, Until
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, dump_line, rows_of
from probing.client.session import job_named, missing_rows, opened, warn, warn_unless_told
from probing.client.settings import Settings
from probing.client.times import Bound, Interval, interval
from probing.client.zone import clock_ms

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Filter", "Options", "collect", "followed", "lines_text", "run")

EXAMPLES = ("probingctl logs --job 4711 --kind nan --follow",)
MOST_LINES = 10_000
FOLLOW_S = 1.0
_MOST_SEEN = 10 * MOST_LINES
# The interval that is searched for new lines: a row is stored some time after its ``ts``, because rows are buffered and
# the clocks of nodes differ.
_LATE = Interval(Bound(60.0))
_LINES = """
SELECT node, ts, epoch_ns(ts) AS t, job, run, rank, pid, tid, stream, kind, line, suppressed
FROM process.logs WHERE {where} ORDER BY ts DESC LIMIT {limit}
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Filters lines by job, rank, and a text in their kind (case-insensitive); None: no filter."""

    job: str | None
    rank: int | None
    kind: str | None

    def sql(self, during: Interval) -> str:
        """Returns the SQL condition for the chosen lines of an interval."""
        conditions = [] if self.job is None else [f"job = {sql_text(self.job)}"]
        conditions += [] if self.rank is None else [f"rank = {self.rank}"]
        conditions += [] if self.kind is None else [f"contains(lower(kind), {sql_text(self.kind.lower())})"]
        return " AND ".join([*conditions, during.sql()])


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    rank: Rank = None
    kind: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only lines that match a pattern with this text in it.")
    ] = None
    since: Since = "1h"
    until: Until = None
    follow: Annotated[bool, typer.Option("--follow", help="Show new lines as they come.")] = False


def run(settings: Settings, options: Options) -> None:
    follow, during = options.follow, interval(options.since, options.until)
    if follow and settings.format not in ("table", "jsonl"):
        raise UsageError("--follow writes tables or -f jsonl only")
    if follow and not during.open:
        raise UsageError("--follow shows lines after now, and --until ends the interval", hint="leave one out")
    if follow and settings.output is not None:
        raise UsageError("--follow writes to stdout", hint="redirect it with > FILE")
    with opened(settings) as cluster:
        chosen = Filter(job_named(cluster, options.job), options.rank, options.kind)
        found = collect(cluster, chosen, during)
        if not found and not follow and settings.format == "table" and not _enabled(cluster):
            warn("lines are not collected: `probingctl config logs.enabled=true` collects them, with --job for one job")
        if len(found) == MOST_LINES:
            warn(f"only the last {MOST_LINES:,} lines are shown")
        if not follow:
            write_objects(settings, found, lines_text(found, during, chosen), found)
            return
        told: list[str] = []
        for rows, whole in followed(cluster, chosen, found):
            told = _warned(cluster, told, whole=whole)
            sys.stdout.write("".join(dump_line(rows)) if settings.format == "jsonl" else _lines(rows, chosen))
            sys.stdout.flush()


def _warned(cluster: Cluster, told: Sequence[str], *, whole: bool) -> list[str]:
    """Returns a warning for each node that did not answer the last question or lacks rows, and a warning if the answer
    was not ``whole``. Writes the warnings that ``told`` does not contain."""
    texts = [f"node {node} is missing: {reason}" for node, reason in silent_nodes(cluster).items()]
    texts += missing_rows(cluster.outcomes)
    if not whole:
        texts.append(f"more than {MOST_LINES:,} lines came at once: only the last {MOST_LINES:,} are shown")
    warn_unless_told(texts, told)
    return texts


def collect(cluster: Cluster, chosen: Filter, during: Interval) -> list[Row]:
    """Returns the last lines, at most MOST_LINES, ordered by time; docs/json.md describes them."""
    rows = rows_of(cluster.query(_LINES.format(where=chosen.sql(during), limit=MOST_LINES)))
    rows.sort(key=lambda row: (row["t"], row["node"], row["pid"], row["tid"]))
    return [{name: value for name, value in row.items() if name != "t"} for row in rows]


def followed(cluster: Cluster, chosen: Filter, found: Sequence[Row]) -> Iterator[tuple[list[Row], bool]]:
    """Yields ``found``, then a list of the new lines each second. Each list comes with a flag, which is False if lines
    before the list were left out. Ends only with an error."""
    yield list(found), True
    seen = dict.fromkeys(map(_identity, found))
    while True:
        time.sleep(FOLLOW_S)
        # Outcomes are dropped, because they hold the lines of all answers and would fill the memory.
        cluster.outcomes.clear()
        rows = collect(cluster, chosen, _LATE)
        # If the oldest line of a full answer was not shown before, more new lines came than fit in the answer, so some
        # are missing.
        whole = len(rows) < MOST_LINES or _identity(rows[0]) in seen
        yield [row for row in rows if _identity(row) not in seen], whole
        # Lines of earlier answers are remembered too, because they are found again if the clock of a node is set back.
        seen |= dict.fromkeys(map(_identity, rows))
        for oldest in list(seen)[: max(0, len(seen) - _MOST_SEEN)]:
            del seen[oldest]


def lines_text(found: Sequence[Row], during: Interval, chosen: Filter) -> str:
    """Returns a line of text for each row: time, rank, node, stream, and the job unless one job was chosen."""
    return _lines(found, chosen) or f"(no line was stored {during.text()})\n"


def _lines(rows: Sequence[Row], chosen: Filter) -> str:
    return "".join(f"{escape(_line(row, of_any_job=chosen.job is None))}\n" for row in rows)


def _line(row: Row, *, of_any_job: bool) -> str:
    rank = f"rank {'?' if row['rank'] is None else row['rank']} on {row['node']}"
    if of_any_job:
        rank = f"job {row['job'] or '?'} {rank}"
    left_out = f"  ({row['suppressed']:,} such lines before it were left out)" if row["suppressed"] else ""
    # Only the time of day is shown; the other formats have the date.
    return f"{clock_ms(row['ts'])} {rank} {row['stream'] or '?'}: {row['line']}{left_out}"


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("node", "ts", "pid", "tid", "stream", "line"))


def _enabled(cluster: Cluster) -> bool:
    try:
        return any(setting["value"] == "true" for setting in cluster.config("logs.enabled"))
    except NotFound:
        # This daemon does not have the setting, so the advice would be wrong.
        return True
