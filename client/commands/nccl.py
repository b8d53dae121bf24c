"""``nccl``: shows communicators and their operations, of NCCL, gloo and other backends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import NotFound
from probing.api.text import sql_text
from probing.client.collectives import sql as nccl_sql
from probing.client.collectives.in_flight import CALLED, INFLIGHT, in_flight
from probing.client.collectives.silence import Process, silent
from probing.client.collectives.standing import RECENT, Run, idle, standing, standings, state_rows, state_statements
from probing.client.collectives.text import people
from probing.client.options import Job, Since, Until
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import terminal_width
from probing.client.session import job_named, opened, pause_lines, require_live, shown_pauses
from probing.client.settings import Settings
from probing.client.times import Interval, interval
from probing.federation.execution.clocks import spread_ns

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.diagnosis.wait_graph import Pending

__all__ = ("EXAMPLES", "Options", "Row", "collect", "run")

EXAMPLES = ("probingctl nccl --all-nodes --job 4711", "probingctl nccl --job 29500 --since 1h -f json")
_Found = dict[tuple[object, ...], Row]
_KEY = ("job", "run", "comm")
_NAMED = ("name", "backend", "size")
_STATEMENTS = {
    "totals": nccl_sql.TOTALS,
    "ops": nccl_sql.OPS,
    "ranks": nccl_sql.RANKS,
    "inflight": INFLIGHT,
    "called": CALLED,
    "failed": nccl_sql.FAILED,
    "timings": nccl_sql.TIMINGS,
    "known": nccl_sql.COMMUNICATORS,
    "recent": RECENT,
}
_OF_NOW = ("inflight", "called", "recent")
# If the ranks of a communicator report different states, the first state in this order is shown.
_STATES = ("failed", "aborted", "active", "finalized", "destroyed")


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    comm: Annotated[str | None, typer.Option(metavar="COMM", help="Only this communicator.")] = None
    since: Since = "5m"
    until: Until = None


def run(settings: Settings, options: Options) -> None:
    during = interval(options.since, options.until)
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        paused = pause_lines(cluster)
        found, pending = collect(cluster, job, options.comm, during)
        if not found and options.comm is not None:
            _require_comm(cluster, job, options.comm)
        if not found and job is not None and during.open:
            require_live(cluster, job)
        width = terminal_width() if settings.output is None else None
        text = shown_pauses(settings, paused) + people(found, during, width, pending)
        write_objects(settings, found, text, _flat(found))


def _require_comm(cluster: Cluster, job: str | None, comm: str) -> None:
    """Raises NotFound if no node knows the communicator."""
    of_job = "true" if job is None else f"job = {sql_text(job)}"
    sql = f"SELECT count(*) AS known FROM comm.communicators WHERE comm = {sql_text(comm)} AND {of_job}"
    if not rows_of(cluster.query(sql))[0]["known"]:
        whose = "" if job is None else f" of job {job}"
        raise NotFound(
            f"there is no communicator {comm}{whose}",
            hint="`probingctl nccl` lists the communicators that have operations",
        )


def collect(
    cluster: Cluster, job: str | None, comm: str | None, during: Interval
) -> tuple[list[Row], dict[Run, list[Pending]]]:
    """Returns communicators with ``ops``, ``ranks``, ``inflight`` and ``failed``, as docs/json.md describes, and the
    operations in flight by run, which are empty unless the interval reaches to now. Reads one snapshot of each node."""
    of_job = "true" if job is None else f"job = {sql_text(job)}"
    where = of_job if comm is None else f"{of_job} AND comm = {sql_text(comm)}"
    asked = {"where": where, "during": during.sql(), "of_job": of_job}
    past = {} if during.open else {**asked, "where": "false", "of_job": "false"}
    statements = {
        name: sql.format(**(past if past and name in _OF_NOW else asked)) for name, sql in _STATEMENTS.items()
    }
    # A stream belongs to one node, so each node adds up its own operations and need not send them.
    tables = cluster.query_all({**statements, **state_statements(of_job, during)}, each=("totals",))
    results = {name: rows_of(tables[name]) for name in statements}
    found: _Found = {}
    active = {_key(row) for name in ("ops", "inflight") for row in results[name]}
    members: dict[tuple[object, ...], list[Row]] = {}
    for row in results["known"]:
        # Communicators without operations are too many to show.
        if _key(row) in active or comm is not None:
            members.setdefault(_key(row), []).append(row)
    for rows in members.values():
        own = _communicator(found, rows[0])
        _describe(own, rows)
        own["clock_spread_ns"] = _spread(cluster, {row["node"] for row in rows})
    busy = {(row["node"], row["pid"]) for name in ("recent", "inflight") for row in results[name]}
    live, findings, ended = state_rows(tables)
    runs, trainers, _ = standings(live if during.open else (), findings, ended, now=during.open)
    pending = in_flight(live, results["inflight"], results["called"], results["known"])
    for name in ("ops", "ranks", "inflight", "failed"):
        for row in results[name]:
            _communicator(found, row)[name].append(row)
            for field in (*_KEY, *_NAMED):
                row.pop(field, None)
    _total(found, results["timings"], results["totals"])
    _stand(cluster, found, runs, trainers, busy, every_run=comm is None)
    for own in found.values():
        _sort(own)
    return [found[key] for key in sorted(found, key=str)], pending


def _spread(cluster: Cluster, nodes: set[str]) -> int | None:
    """Returns the maximum difference of the nodes' clocks, ns, which is the error of lags between nodes; None for one
    node.
    """
    now_ns = time.monotonic_ns()
    return spread_ns(cluster.clocks.of(node, now_ns) for node in nodes) if len(nodes) > 1 else None


def _stand(
    cluster: Cluster,
    found: _Found,
    runs: Mapping[Run, Row],
    trainers: Mapping[Run, Sequence[Row]],
    busy: Container[Process],
    *,
    every_run: bool,
) -> None:
    """Adds the state of each run; with ``every_run`` also an entry without ``comm`` for each run that has no
    operations.
    """
    shown = {key[:2] for key in found}
    waiting = {run: idle(live, busy) for run, live in trainers.items()}
    waiting = {run: rows for run, rows in waiting.items() if run in shown or (every_run and rows)}
    quiet: dict[Run, list[Row]] = {}
    for row in silent(cluster, [row for rows in waiting.values() for row in rows]):
        quiet.setdefault((row["job"], row["run"]), []).append(row)
    for run, rows in waiting.items():
        runs[run]["silent"] = quiet.get(run, [])
        runs[run]["silent_more"] = len(rows) - len(quiet.get(run, []))
        if run not in shown:
            live = trainers[run]
            nothing = {"job": run[0], "run": run[1], "comm": None, "size": live[0]["world_size"]}
            _communicator(found, nothing)["members"] = sorted(r["rank"] for r in live if r["rank"] is not None)
    for (job, name, _), communicator in found.items():
        communicator.update(runs.get((job, name), standing()))


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in _KEY)


def _communicator(found: _Found, row: Row) -> Row:
    fresh: Row = {
        **{name: row[name] for name in _KEY},
        **{name: row.get(name) for name in _NAMED},
        "state": None,
        "states": {},
        "role": None,
        "role_why": None,
        "members": [],
        "nodes": None,
        "clock_spread_ns": None,
        "aborted": None,
        "async_error": None,
        "ops": [],
        "totals": {},
        "ranks": [],
        "inflight": [],
        "failed": [],
    }
    own = found.setdefault(_key(row), fresh)
    for name in _NAMED:
        own[name] = own[name] if own[name] is not None else row.get(name)
    return own


def _describe(own: Row, members: Sequence[Row]) -> None:
    """Fills in the fields of a communicator that its members report."""
    for name in _NAMED:
        own[name] = next((row[name] for row in members if row[name] is not None), own[name])
    own["members"] = sorted({row["rank"] for row in members if row["rank"] is not None})
    own["nodes"] = len({row["node"] for row in members})
    aborted = [row["aborted"] for row in members if row["aborted"] is not None]
    own["aborted"] = any(aborted) if aborted else None
    own["async_error"] = next((row["async_error"] for row in members if row["async_error"]), None)
    states = Counter(row["state"] for row in members if row["state"] is not None)
    own["states"] = dict(sorted(states.items()))
    own["state"] = next((state for state in _STATES if state in states), next(iter(own["states"]), None))
    # A role that some rank reports is shown even if other ranks do not know the role.
    roles = [row for row in members if row["role"] not in (None, "unknown")] or [r for r in members if r["role"]]
    if roles:
        own["role"], own["role_why"] = roles[0]["role"], roles[0]["role_why"]


def _total(found: _Found, timings: Sequence[Row], totals: Sequence[Row]) -> None:
    for own in found.values():
        own["totals"] = {
            "calls": sum(op["calls"] for op in own["ops"]),
            "bytes": sum(op["bytes"] or 0 for op in own["ops"]),
            "timed": sum(op["timed"] for op in own["ops"]),
            "timing_sources": {},
            "busy_ns": None,
            "moved": None,
            "on_bus": None,
            "algbw_gbps": None,
            "busbw_gbps": None,
        }
    for row in sorted(timings, key=lambda row: str(row["timing_source"])):
        found[_key(row)]["totals"]["timing_sources"][row["timing_source"] or "none"] = row["calls"]
    for row in totals:
        if row["busy_ns"]:
            own = found[_key(row)]["totals"]
            for name in ("busy_ns", "moved", "on_bus"):
                own[name] = (own[name] or 0) + (row[name] or 0)
    for communicator in found.values():
        own = communicator["totals"]
        moved, on_bus = own.pop("moved"), own.pop("on_bus")
        if own["busy_ns"] and moved:
            own["algbw_gbps"], own["busbw_gbps"] = moved / own["busy_ns"], on_bus / own["busy_ns"] if on_bus else None


def _sort(own: Row) -> None:
    own["ops"].sort(key=lambda r: r["op"] or "")
    own["ranks"].sort(key=lambda r: (r["rank"] is None, r["rank"] or 0, r["comm_rank"] or 0, r["node"], r["pid"]))
    own["inflight"].sort(key=lambda r: (r["seq"] or 0, r["rank"] is None, r["rank"] or 0, r["pid"]))
    own["failed"].sort(key=lambda r: (r["last"], r["rank"] is None, r["rank"] or 0), reverse=True)


def _flat(found: list[Row]) -> list[Row]:
    """Returns a row for each communicator and operation, for formats that consist of rows."""
    head = (*_KEY, *_NAMED, "state", "role")
    return [{**{name: own[name] for name in head}, **op} for own in found for op in own["ops"]]
