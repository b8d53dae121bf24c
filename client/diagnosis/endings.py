"""Reads process.events: how processes of jobs ended, and which exit was the first failure of its run.

The first failure is the rank that a finding of the daemon names. Without such a finding ``diagnosis.deaths`` chooses it
from the exits.
"""

from __future__ import annotations

import signal as signals
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from probing.api.text import sql_text
from probing.client.diagnosis.findings import DEATHS, dead_ranks, ns_of
from probing.client.render.rows import Row, rows_of
from probing.client.times import Interval
from probing.client.zone import clock

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.diagnosis.facts import Exit, Facts

__all__ = ("MOST", "death_text", "ended", "ended_sql", "events", "exits", "facts_of_exits", "how", "recent")

# The maximum number of rows in an answer; older rows are left out.
MOST = 1000
# The maximum number of rows that a query reads. It holds for all nodes together or, if each node is queried alone, for
# each node.
_MOST_READ = 10 * MOST
# The search for the first failure of a run begins this long before the interval, s.
_BEFORE_S = 86400
_ENDS = "'exit', 'oom_kill'"
_EVENTS = f"""
SELECT ts, node, job, run, rank, role, pid, start_ns, event, exit_code, signal,
  {{recent}} AS recent
FROM process.events WHERE event IN ({{kinds}}) AND {{before}} AND {{where}}
ORDER BY ts DESC LIMIT {_MOST_READ}
"""


def events(cluster: Cluster, where: str, during: Interval) -> list[Row]:
    """Returns the starts, exits and kills in the interval ``during``, oldest first; only the newest MOST of them.

    Each row has ``oom``, ``first`` (whether it is the exit of the rank that failed first in its run) and ``detail``.
    ``where`` is an SQL condition on process.events.
    """
    rows, findings = _asked(cluster, where, during, ("start", "identified", "exit", "oom_kill"))
    whole = _is_whole(rows)
    rows = sorted([*_starts(cluster, rows, during), *rows], key=lambda row: str(row["ts"]))
    # A process may be identified a moment after its start, so its newest row has its job and rank.
    newest = {_process(row): row for row in rows}
    for row in rows:
        row.update({name: newest[_process(row)][name] for name in ("job", "run", "rank", "role")})
    return recent(row for row in _described(rows, findings, whole=whole) if row["event"] != "identified")


def _starts(cluster: Cluster, rows: list[Row], during: Interval) -> list[Row]:
    """Returns the starts of the processes that have other events in ``rows``, but no start. They may be missing from
    ``rows`` because the start of a launcher can lack the job, which becomes known later from the launcher's ranks."""
    known = {_process(row) for row in rows if row["event"] == "start"}
    lacking = {_process(row) for row in rows} - known
    if not lacking:
        return []
    pids = ", ".join(sorted({str(pid) for _, pid, _ in lacking}))
    rows = rows_of(cluster.query(_sql(f"pid IN ({pids})", during, ("start",))))[::-1]
    return [row for row in rows if _process(row) in lacking]


def ended(cluster: Cluster, where: str, during: Interval) -> list[Row]:
    """Returns the result of ``exits`` for the rows of the nodes. ``where`` is an SQL condition on the job."""
    return exits(*_asked(cluster, where, during, ("exit", "oom_kill")))


def ended_sql(where: str, during: Interval) -> str:
    """Returns the SELECT for the argument ``rows`` of ``exits``: rows of ``during`` and of the day before, newest
    first."""
    return _sql(where, during, ("exit", "oom_kill"))


def exits(rows: Iterable[Row], findings: Iterable[Row]) -> list[Row]:
    """Returns the exits among ``rows``, oldest first, with the columns of ``events`` and ``recent`` (whether the exit
    lies in the interval). ``findings``: the rows of diagnosis.findings about deaths."""
    ordered = sorted(rows, key=lambda row: str(row["ts"]))
    return [row for row in _described(ordered, findings, whole=_is_whole(ordered)) if row["event"] == "exit"]


def facts_of_exits(cluster: Cluster, job: str) -> list[Facts]:
    """Returns the facts of the last run of ``job`` that ended: its ranks with their exits; empty if no exit is
    stored.
    """
    rows: list[Row] = []
    # If there are too many rows, data loaders are left out: there are many of them, and most of them end with their
    # rank.
    for more in ("", " AND coalesce(role, '') <> 'data_loader'"):
        where = f"job = {sql_text(job)}{more}"
        rows = rows_of(cluster.query(_EVENTS.format(kinds=_ENDS, recent="true", before="true", where=where)))
        if _is_whole(rows):
            break
    runs = _by_run(exits(rows, ()))
    return [_facts(max(runs.values(), key=lambda rows: str(rows[-1]["ts"])))] if runs else []


def recent(rows: Iterable[Row]) -> list[Row]:
    """Returns the ``rows`` that lie in the interval, without the column ``recent``; only the last MOST of them."""
    return [{name: row[name] for name in row if name != "recent"} for row in rows if row["recent"]][-MOST:]


def _sql(where: str, during: Interval, kinds: tuple[str, ...]) -> str:
    before = Interval(during.begin.earlier(_BEFORE_S), during.end).sql()
    named = ", ".join(f"'{kind}'" for kind in kinds)
    return _EVENTS.format(kinds=named, recent=during.sql(), before=before, where=where)


def _asked(cluster: Cluster, where: str, during: Interval, kinds: tuple[str, ...]) -> tuple[list[Row], list[Row]]:
    """Returns the events, oldest first, and the findings of the daemon about deaths."""
    tables = cluster.query_all({"events": _sql(where, during, kinds), "deaths": DEATHS.format(of_job=where)})
    return rows_of(tables["events"])[::-1], rows_of(tables["deaths"])


def _is_whole(rows: Sequence[Row]) -> bool:
    """Returns whether ``rows`` are all rows of the nodes, that is, no limit cut off the oldest rows of a node."""
    of_nodes = Counter(row["node"] for row in rows)
    return len(rows) != _MOST_READ and max(of_nodes.values(), default=0) < _MOST_READ


def _described(rows: list[Row], findings: Iterable[Row], *, whole: bool) -> list[Row]:
    """Returns ``rows`` with ``oom``, ``first`` and ``detail``. ``whole``: no older rows were left out, so the first
    failure is among ``rows``."""
    out_of_memory = {_process(row) for row in rows if row["event"] == "oom_kill"}
    for row in rows:
        row["oom"], row["first"] = _process(row) in out_of_memory, False
    dead = dead_ranks(findings)
    for run, ends in _by_run(row for row in rows if row["event"] == "exit").items():
        if (whole or run in dead) and (first := _first(ends, dead.get(run))) is not None:
            first["first"] = True
    for row in rows:
        row["detail"] = _detail(row)
    return rows


def _by_run(exits: Iterable[Row]) -> dict[tuple[Any, Any], list[Row]]:
    runs: dict[tuple[Any, Any], list[Row]] = {}
    for row in exits:
        runs.setdefault((row["job"], row["run"]), []).append(row)
    return runs


def _first(exits: Sequence[Row], dead: Iterable[int] | None) -> Row | None:
    """Returns the exit of the rank that failed first in a run. ``dead``: the ranks that died first according to a
    finding; None without such a finding.
    """
    if dead is not None:
        return next((row for row in exits if row["role"] == "trainer" and row["rank"] in dead), None)
    if not any(row["signal"] or row["exit_code"] for row in exits):
        return None
    # The rules take a while to import, and most jobs end without a failure.
    from probing.diagnosis.deaths import first_failure

    first = first_failure(_facts(exits))
    return next((row for row in exits if first and _process(row) == (first.node, first.pid, first.start_ns)), None)


def _facts(exits: Sequence[Row]) -> Facts:
    """Returns facts made from the exits of one run, which are ordered from the oldest."""
    from probing.diagnosis.facts import MAX_RANKS, Facts, Missing, Process, Rank

    ranks: dict[int, Rank] = {}
    others = []
    for row in exits:
        who, end = (str(row["node"]), row["pid"], row["start_ns"] or 0), _exit(row)
        if row["role"] == "trainer" and isinstance(row["rank"], int) and 0 <= row["rank"] < MAX_RANKS:
            # A rank that was restarted within its run has several exits; the last exit counts.
            ranks[row["rank"]] = Rank(row["rank"], *who, "exited", exit=end)
        elif row["role"] != "other":
            others.append(Process(*who, str(row["role"]), "exited", end))
    unseen = Missing("operations", "only the exits of its processes are known by now, not what they did")
    return Facts(
        str(exits[0]["job"]),
        str(exits[0]["run"] or ""),
        None,
        0.0,
        max(_exit(row).ts_ns for row in exits),
        (),
        tuple(ranks[number] for number in sorted(ranks)),
        processes=tuple(others),
        missing=(unseen,),
    )


def _exit(row: Row) -> Exit:
    from probing.diagnosis.facts import Exit

    return Exit(ns_of(row["ts"]) or 0, row["exit_code"], row["signal"], bool(row["oom"]))


def how(row: Row) -> str:
    """Returns a text that says how a process ended, from ``exit_code``, ``signal`` and ``oom``."""
    if row["signal"] is not None:
        return f"killed by {_signal(row['signal'])}" + (" (OOM)" if row["oom"] else "")
    return "ended in an unknown way" if row["exit_code"] is None else f"exited with code {row['exit_code']}"


def death_text(row: Row) -> str:
    """Returns a text such as ``rank 3 (pid 12 on alpha) was killed by SIGKILL (OOM) at 03:12:07Z``."""
    who = f"rank {row['rank']}" if row["rank"] is not None else str(row["role"])
    verb = "was " if row["signal"] is not None else ""
    return f"{who} (pid {row['pid']} on {row['node']}) {verb}{how(row)} at {clock(row['ts'])}"


def _detail(row: Row) -> str:
    if row["event"] == "start":
        return str(row["role"])
    if row["event"] == "oom_kill":
        return "the kernel was out of memory"
    return how(row) + (", first to fail" if row["first"] else "")


def _process(row: Row) -> tuple[Any, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
