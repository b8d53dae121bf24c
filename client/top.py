"""``top``: all ranks live, one frame after the other."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from probing.api.errors import ProbingError, UsageError
from probing.client.cluster import Cluster
from probing.client.interrupt import leaving_by_it
from probing.client.nccl_sql import RANKS
from probing.client.output import write_objects
from probing.client.render import terminal_width
from probing.client.rows import rows_of
from probing.client.session import job_named, opened, require_job, sql_text
from probing.client.settings import Settings
from probing.client.text import escape
from probing.client.top_text import people

__all__ = ("Frame", "collect", "run")

# Shows the cursor, and what was on the terminal before.
_SCREEN_BACK = b"\x1b[?25h\x1b[?1049l"
_PROCESSES = """
SELECT node, job, run, rank, world_size, pid, state FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {where}
"""
_RATES = """
SELECT node, job, run, pid, count(*) AS calls FROM comm.ops
WHERE ts > now() - INTERVAL {window} SECOND AND {where} GROUP BY node, job, run, pid
"""
# Steps are told when they have ended: of long ones the last may lie before the window.
_STEPS = """
SELECT node, job, run, pid, max(step) AS step, arg_max(1e9 / duration_ns, step) AS steps_per_s FROM train.steps
WHERE ts > now() - INTERVAL 10 MINUTE AND {where} GROUP BY node, job, run, pid
"""
_INFLIGHT = """
SELECT node, job, run, comm, comm_rank, rank, pid, op, seq, age_ns FROM comm.inflight WHERE {where}
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """``ranks``: a dict a trainer, as docs/json.md describes; ``missing``: what could not be asked, for people."""

    ranks: list[dict[str, Any]]
    missing: tuple[str, ...] = ()


def run(settings: Settings, job: str | None, *, once: bool, interval: float, window: float) -> None:
    if once:
        with opened(settings) as cluster:
            job = job_named(cluster, job)
            frame = collect(cluster, job, window)
            if not frame.ranks and job is not None:
                require_job(cluster, job)
            text = people(frame.ranks, frame.missing, terminal_width(), None)
            write_objects(settings, frame.ranks, text, frame.ranks)
        return
    if not sys.stdout.isatty() or settings.format != "table":
        raise UsageError("top without --once needs a terminal", hint="use `probingctl top --once`")
    with opened(settings) as cluster, leaving_by_it(_SCREEN_BACK):
        _live(cluster, job_named(cluster, job), interval, window)


def _live(cluster: Cluster, job: str | None, interval: float, window: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            begun = time.monotonic()
            cluster.outcomes.clear()
            live.update(Text(_frame_text(cluster, job, window), no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(max(0.1, interval - (time.monotonic() - begun)))


def _frame_text(cluster: Cluster, job: str | None, window: float) -> str:
    columns, lines = shutil.get_terminal_size((100, 40))
    clock = time.strftime("%H:%M:%SZ", time.gmtime())
    head = f"probingctl top  {clock}  {'all nodes' if cluster.many else cluster.target}  (Ctrl-C ends)\n\n"
    try:
        frame = collect(cluster, job, window)
    except ProbingError as e:
        # The daemon may be restarting: the next frame asks again.
        return head + escape(f"error: {e.message}") + "\n" + escape(f"hint: {e.hint}" if e.hint else "")
    return head + people(frame.ranks, frame.missing, columns, lines - 3)


def collect(cluster: Cluster, job: str | None, window: float) -> Frame:
    """One frame: every trainer with its rate and lag over the last ``window`` seconds, and what it does now."""
    where = f"job = {sql_text(job)}" if job is not None else "true"
    seconds = max(1, round(window))
    asks = (
        partial(cluster.query, sql.format(where=where, window=seconds, since=seconds))
        for sql in (_PROCESSES, _RATES, RANKS, _INFLIGHT, _STEPS)
    )
    processes, rates, late, inflight, stepped = map(rows_of, cluster.at_once(list(asks)))
    python, missing = _python(cluster, job)
    calls = {_process(row): row for row in rates}
    steps = {_process(row): row for row in stepped}
    now: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(inflight, key=lambda r: r["age_ns"] or 0):
        now[_process(row)] = row
    lags: dict[tuple[Any, ...], int] = {}
    for row in late:
        lags[_process(row)] = max(lags.get(_process(row), row["lag_ns"]), row["lag_ns"])
    ranks = [
        {
            **row,
            "collectives_per_s": calls[key]["calls"] / seconds if key in calls else 0.0,
            **{name: steps[key][name] if key in steps else None for name in ("step", "steps_per_s")},
            "lag_ns": lags.get(key),
            **{name: now[key][name] if key in now else None for name in ("comm", "op", "seq", "age_ns")},
            "python": python.get(key),
        }
        for row in processes
        for key in [_process(row)]
    ]
    ranks.sort(key=lambda r: (r["job"], r["run"], r["rank"] is None, r["rank"] or 0, r["node"], r["pid"]))
    failed = (failed for outcome in cluster.outcomes for failed in outcome.failed)
    lost = (f"node {f.node or f.address}: {f.reason}" for f in failed)
    return Frame(ranks, tuple(dict.fromkeys([*lost, *missing])))


def _process(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["node"], row["pid"]


def _python(cluster: Cluster, job: str | None) -> tuple[dict[tuple[Any, ...], str], list[str]]:
    """The innermost frame of every main thread as text, and what could not be read."""
    try:
        found = cluster.stacks(job=job or "")
    except ProbingError as e:
        # The other columns are still worth a frame.
        return {}, [f"stacks: {e.message}"]
    main = {_process(t): _innermost(t["frames"]) for t in found.threads if t["tid"] == t["pid"]}
    return main, [f"stack of pid {f['pid']} on {f['node']}: {f['reason']}" for f in found.failures]


def _innermost(frames: Sequence[dict[str, Any]]) -> str:
    if not frames:
        return ""
    frame = frames[0]
    name = str(frame["file"]).rsplit("/", 1)[-1]
    return f"{frame['func']} ({name}:{frame['lineno']})" if frame["lineno"] is not None else f"{frame['func']} ({name})"
