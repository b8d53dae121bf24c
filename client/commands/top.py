"""``top``: shows all ranks live, one frame after the other."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import LATE, ProbingError, UsageError
from probing.api.text import escape, sql_text
from probing.client.collectives.in_flight import CALLED, INFLIGHT, in_flight
from probing.client.collectives.ranks import PHASES, Seen, process_of, rank_rows
from probing.client.collectives.silence import Process, innermost, silent
from probing.client.collectives.sql import RANKS
from probing.client.collectives.standing import state_rows, state_statements
from probing.client.collectives.top_text import Frame, people
from probing.client.diagnosis.endings import ended, recent
from probing.client.interrupt import leaving_by_it
from probing.client.options import Job
from probing.client.render.output import write_objects
from probing.client.render.rows import rows_of
from probing.client.render.table import terminal_width
from probing.client.session import job_named, opened, pause_lines, require_live, shown_pauses
from probing.client.settings import Settings
from probing.client.times import Bound, Interval, seconds
from probing.client.zone import now_text

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "collect", "run")

EXAMPLES = ("probingctl top --all-nodes --job 4711", "probingctl top --once")
# Ends all modes of the terminal that textual has switched on, and restores its cursor and contents.
_SCREEN_BACK = b"\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[<u\x1b[?1004l\x1b[?25h\x1b[?1049l"
# How long top waits for the first answer before it draws the screen, s.
_FIRST_S = 1.0
# The maximum time that the screen waits for a node, s.
_PATIENCE_S = 5.0
_RATES = """
SELECT node, job, run, pid, count(*) AS calls, epoch_ns(now()) - epoch_ns(max(ts)) AS last_age_ns FROM comm.ops
WHERE ts > now() - INTERVAL {window} SECOND AND {where} GROUP BY node, job, run, pid
"""
# A step is stored when it ends, so in a job with long steps the last row may be older than the window.
_STEPS = """
SELECT node, job, run, pid, max(step) AS step, arg_max(1e9 / duration_ns, step) AS steps_per_s,
  epoch_ns(now()) - epoch_ns(max(t_end)) AS step_age_ns
FROM train.steps WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid
"""
_STATEMENTS = {
    "rates": _RATES,
    "ranks": RANKS,
    "inflight": INFLIGHT,
    "called": CALLED,
    "steps": _STEPS,
    "phases": PHASES,
}
# A run that has ended stays on the screen for this long.
_SHOWN_ENDED = Interval(Bound(600.0))


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False
    interval: Annotated[str | None, typer.Option(metavar="TIME", help="Time between frames; default: 1s.")] = None
    window: Annotated[str, typer.Option(metavar="TIME", help="Time over which rates and lags are computed.")] = "10s"


def run(settings: Settings, options: Options) -> None:
    if options.once and options.interval is not None:
        raise UsageError("--once prints one frame, so there is no --interval", hint="leave one out")
    interval, window = seconds(options.interval or "1s"), seconds(options.window)
    if options.once:
        with opened(settings) as cluster:
            job = job_named(cluster, options.job)
            frame = collect(cluster, job, window)
            if not frame.ranks and job is not None:
                require_live(cluster, job)
            width = terminal_width() if settings.output is None else None
            text = shown_pauses(settings, frame.paused) + people(frame, width, None)
            write_objects(settings, frame.ranks, text, frame.ranks)
        return
    if settings.format != "table" or settings.output is not None:
        raise UsageError("top writes files and other formats only with --once", hint="use `probingctl top --once`")
    if _on_screen():
        with opened(replace(settings, timeout=min(settings.timeout, _PATIENCE_S))) as cluster, leaving_by_it():
            _require_answer(cluster, settings)
            _screen(cluster, _job(cluster, options.job), interval, window)
        return
    with opened(settings) as cluster, leaving_by_it():
        _require_answer(cluster, settings)
        _lines(settings, cluster, _job(cluster, options.job), interval, window)


def _require_answer(cluster: Cluster, settings: Settings) -> None:
    """Raises the first error if all nodes fail within a second, as other commands do; slow nodes may answer later."""
    from probing.client.top.fetch import name_of

    gathered = cluster.ask(settings.nodes or (settings.target,), name_of, _FIRST_S)
    if not gathered.answered and not any(failed.error.code == LATE for failed in gathered.failed):
        raise gathered.failed[0].error


def _job(cluster: Cluster, text: str | None) -> str | None:
    """Returns the job that --job names. Raises NotFound if it ended before the time that the screen shows."""
    job = job_named(cluster, text)
    if job is not None and not recent(ended(cluster, _where(job), _SHOWN_ENDED)):
        require_live(cluster, job)
    return job


def _on_screen() -> bool:
    """Returns whether stdin and stdout are terminals, and the terminal can be drawn on."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _screen(cluster: Cluster, job: str | None, interval: float, window: float) -> None:
    from probing.client.top.live import Live

    live = Live(cluster, _where(job), interval, window)
    with leaving_by_it(_SCREEN_BACK):
        # The nodes are asked while the library textual is imported.
        live.start()
        from probing.client.top.screen import run_screen

        try:
            run_screen(live)
        finally:
            live.stop()


def _lines(settings: Settings, cluster: Cluster, job: str | None, interval: float, window: float) -> None:
    """Prints one frame after the other. A line with the time of the frame comes before each frame."""
    while True:
        begun = time.monotonic()
        cluster.outcomes.clear()
        try:
            frame = collect(cluster, job, window)
            text = shown_pauses(settings, frame.paused) + people(frame, None, None)
        except ProbingError as e:
            # The daemon may be restarting; the next frame asks again.
            text = escape(f"error: {e.message}") + "\n"
        sys.stdout.write(f"-- {now_text('%Y-%m-%d %H:%M:%S')}\n{text}")
        sys.stdout.flush()
        time.sleep(max(0.1, interval - (time.monotonic() - begun)))


def _where(job: str | None) -> str:
    return f"job = {sql_text(job)}" if job is not None else "true"


def collect(cluster: Cluster, job: str | None, window: float) -> Frame:
    """Returns one frame: each trainer with its rate and lag over the last ``window`` seconds, and the state of each
    run.
    """
    where = _where(job)
    seconds = max(1, round(window))
    lately = Interval(Bound(seconds)).sql()
    statements = {name: sql.format(where=where, window=seconds, during=lately) for name, sql in _STATEMENTS.items()}
    tables = cluster.query_all({**statements, **state_statements(where, _SHOWN_ENDED)})
    live, findings, gone = state_rows(tables)
    rates, late, inflight, called, stepped, phases = (rows_of(tables[name]) for name in _STATEMENTS)
    python, missing = _python(cluster, job) if live else ({}, [])
    lags: dict[Process, int] = {}
    for row in late:
        lags[process_of(row)] = max(lags.get(process_of(row), row["lag_ns"]), row["lag_ns"])
    seen = Seen(
        live,
        findings,
        gone,
        {process_of(row): {**row, "collectives_per_s": row["calls"] / seconds} for row in rates},
        {process_of(row): row for row in stepped},
        {process_of(row): row for row in sorted(inflight, key=lambda r: r["age_ns"] or 0)},
        lags,
        python,
        {process_of(row): row["phase"] for row in phases},
    )
    ranks, runs = rank_rows(seen, partial(silent, cluster))
    pending = in_flight(live, inflight, called)
    return Frame(ranks, runs, pending, pause_lines(cluster), tuple(dict.fromkeys([*_lost(cluster), *missing])))


def _lost(cluster: Cluster) -> list[str]:
    failed = (failed for outcome in cluster.outcomes for failed in outcome.failed)
    return [f"node {f.node or f.address}: {f.reason}" for f in failed]


def _python(cluster: Cluster, job: str | None) -> tuple[dict[Process, str], list[str]]:
    """Returns the innermost Python frame of each process's training thread, and a line for each stack that could not be
    read.
    """
    try:
        found = cluster.stacks(job=job or "")
    except ProbingError as e:
        # The frame is shown without the column of Python frames.
        return {}, [f"stacks: {e.message}"]
    main = {process_of(t): innermost(t["frames"]) or "" for t in found.threads if t["trains"]}
    return main, [f"stack of pid {f['pid']} on {f['node']}: {f['reason']}" for f in found.failures]
