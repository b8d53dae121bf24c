"""``top``: shows all ranks live, one frame after the other."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import ProbingError, UsageError
from probing.client.collectives.endings import ended_sql, exits, how
from probing.client.collectives.native_waits import innermost
from probing.client.collectives.silence import Process, SilenceWatch, silent
from probing.client.collectives.sql import RANKS
from probing.client.collectives.standing import LIVE, Run, idle, standings
from probing.client.collectives.top_text import Frame, people
from probing.client.interrupt import leaving_by_it
from probing.client.options import Job
from probing.client.paused import pause_lines, shown_pauses
from probing.client.render.output import write_objects
from probing.client.render.rows import Record, Row, rows_of
from probing.client.render.table import terminal_width
from probing.client.render.text import escape
from probing.client.session import job_named, opened, require_job, sql_text
from probing.client.settings import Settings, seconds

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "collect", "run")

EXAMPLES = ("probingctl top --all-nodes --job 4711", "probingctl top --once")
# Restores the cursor and the previous contents of the terminal.
_SCREEN_BACK = b"\x1b[?25h\x1b[?1049l"
_RATES = """
SELECT node, job, run, pid, count(*) AS calls, epoch_ns(now()) - epoch_ns(max(ts)) AS last_age_ns FROM comm.ops
WHERE ts > now() - INTERVAL {window} SECOND AND {where} GROUP BY node, job, run, pid
"""
# A step gets its row when it ends, so the last row of long steps may be older than the window.
_STEPS = """
SELECT node, job, run, pid, max(step) AS step, arg_max(1e9 / duration_ns, step) AS steps_per_s,
  epoch_ns(now()) - epoch_ns(max(t_end)) AS step_age_ns
FROM train.steps WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid
"""
_INFLIGHT = """
SELECT node, job, run, comm, comm_rank, rank, pid, op, seq, age_ns FROM comm.inflight WHERE {where}
"""
_STATEMENTS = {"live": LIVE, "rates": _RATES, "ranks": RANKS, "inflight": _INFLIGHT, "steps": _STEPS}
# How long a run that has ended stays in view, s.
_ENDED_S = 600.0
_RANK_FIELDS = (
    "node", "job", "run", "rank", "world_size", "pid", "start_ns", "state", "collectives_per_s", "last_age_ns", "step",
    "steps_per_s", "step_age_ns", "lag_ns", "comm", "op", "seq", "age_ns", "python", "waits_in", "began_unseen",
    "unseen_until", "ended", "how", "first",
)  # fmt: skip
_ENDS = ("ended", "how", "first")
_SILENCE = ("waits_in", "began_unseen", "unseen_until")


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between frames.")] = "1s"
    window: Annotated[str, typer.Option(metavar="TIME", help="Time over which rates and lags are taken.")] = "10s"


def run(settings: Settings, options: Options) -> None:
    interval, window = seconds(options.interval), seconds(options.window)
    if options.once:
        with opened(settings) as cluster:
            job = job_named(cluster, options.job)
            frame = collect(cluster, job, window)
            if not frame.ranks and job is not None:
                require_job(cluster, job)
            width = terminal_width() if settings.output is None else None
            text = shown_pauses(settings, frame.paused) + people(frame, width, None)
            write_objects(settings, frame.ranks, text, frame.ranks)
        return
    if not sys.stdout.isatty() or settings.format != "table":
        raise UsageError("top without --once needs a terminal", hint="use `probingctl top --once`")
    with opened(settings) as cluster, leaving_by_it(_SCREEN_BACK):
        _live(cluster, job_named(cluster, options.job), interval, window)


def _live(cluster: Cluster, job: str | None, interval: float, window: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    watch = SilenceWatch(cluster)
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            begun = time.monotonic()
            cluster.outcomes.clear()
            live.update(Text(_frame_text(cluster, job, window, watch), no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(max(0.1, interval - (time.monotonic() - begun)))


def _frame_text(cluster: Cluster, job: str | None, window: float, watch: SilenceWatch) -> str:
    columns, lines = shutil.get_terminal_size((100, 40))
    clock = time.strftime("%H:%M:%SZ", time.gmtime())
    title = f"probingctl top  {clock}  {'all nodes' if cluster.many else cluster.target}  (Ctrl-C ends)\n\n"
    try:
        frame = collect(cluster, job, window, watch)
    except ProbingError as e:
        # The daemon may be restarting: the next frame asks again.
        return title + escape(f"error: {e.message}") + "\n" + escape(f"hint: {e.hint}" if e.hint else "")
    above = title + "".join(escape(line) + "\n" for line in frame.paused.values())
    return above + people(frame, columns, lines - above.count("\n") - 1)


def collect(cluster: Cluster, job: str | None, window: float, watch: SilenceWatch | None = None) -> Frame:
    """Returns one frame: every trainer with its rate and lag over the last ``window`` seconds, and its present state.

    With ``watch``, native stacks are read in the background for a later frame; without it they are waited for.
    """
    where = f"job = {sql_text(job)}" if job is not None else "true"
    seconds = max(1, round(window))
    statements = {
        name: sql.format(where=where, of_job=where, window=seconds, since=seconds) for name, sql in _STATEMENTS.items()
    }
    tables = cluster.query_all({**statements, "ended": ended_sql(where, _ENDED_S)})
    live, rates, late, inflight, stepped = (rows_of(tables[name]) for name in _STATEMENTS)
    ends = exits(tables["ended"])
    runs, trainers = standings(live, ends)
    python, missing = _python(cluster, job) if live else ({}, [])
    calls = {_process(row): row for row in rates}
    steps = {_process(row): row for row in stepped}
    now = {_process(row): row for row in sorted(inflight, key=lambda r: r["age_ns"] or 0)}
    lags: dict[Process, int] = {}
    for row in late:
        lags[_process(row)] = max(lags.get(_process(row), row["lag_ns"]), row["lag_ns"])
    waiting = [row for own in trainers.values() for row in idle(own, {*calls, *now})]
    quiet = _quiet(runs, waiting, (watch or partial(silent, cluster))(waiting))
    ranks = [
        {
            **row,
            "collectives_per_s": calls[key]["calls"] / seconds if key in calls else 0.0,
            "last_age_ns": calls[key]["last_age_ns"] if key in calls else None,
            **{name: steps[key][name] if key in steps else None for name in ("step", "steps_per_s", "step_age_ns")},
            "lag_ns": lags.get(key),
            **{name: now[key][name] if key in now else None for name in ("comm", "op", "seq", "age_ns")},
            "python": python.get(key),
            **{name: quiet[key][name] if key in quiet else None for name in _SILENCE},
            **dict.fromkeys(_ENDS),
        }
        for row in live
        for key in [_process(row)]
    ]
    ranks += _ended_ranks([row for row in ends if row["recent"] or (row["job"], row["run"]) in trainers], ranks)
    ranks.sort(key=lambda r: (r["job"], r["run"], r["rank"] is None, r["rank"] or 0, r["node"], r["pid"]))
    return Frame(ranks, runs, pause_lines(cluster), tuple(dict.fromkeys([*_lost(cluster), *missing])))


def _quiet(runs: dict[Run, Row], waiting: Sequence[Row], found: list[Row]) -> dict[Process, Row]:
    """Adds the rows of silent ranks to their runs; returns them by process."""
    for row in found:
        runs[row["job"], row["run"]]["silent"].append(row)
    quiet = {_process(row): row for row in found}
    for row in waiting:
        if _process(row) not in quiet:
            runs[row["job"], row["run"]]["silent_more"] += 1
    return quiet


def _ended_ranks(ends: Sequence[Row], live: Sequence[Row]) -> list[Row]:
    """Returns trainers that have ended, with the fields of live ones."""
    nothing: Row = dict.fromkeys(_RANK_FIELDS)
    alive = {_process(row) for row in live}
    return [
        {
            **nothing, **{name: row[name] for name in ("node", "job", "run", "rank", "pid", "start_ns", "first")},
            "state": "exited", "collectives_per_s": 0.0, "ended": row["ts"], "how": how(row),
        }
        for row in ends
        if row["role"] == "trainer" and _process(row) not in alive
    ]  # fmt: skip


def _lost(cluster: Cluster) -> list[str]:
    failed = (failed for outcome in cluster.outcomes for failed in outcome.failed)
    return [f"node {f.node or f.address}: {f.reason}" for f in failed]


def _process(row: Record) -> Process:
    return row["node"], row["pid"]


def _python(cluster: Cluster, job: str | None) -> tuple[dict[Process, str], list[str]]:
    """Returns the innermost frame of every main thread as text, and a line for each stack that could not be read."""
    try:
        found = cluster.stacks(job=job or "")
    except ProbingError as e:
        # The other columns are still shown.
        return {}, [f"stacks: {e.message}"]
    main = {_process(t): innermost(t["frames"]) or "" for t in found.threads if t["tid"] == t["pid"]}
    return main, [f"stack of pid {f['pid']} on {f['node']}: {f['reason']}" for f in found.failures]
