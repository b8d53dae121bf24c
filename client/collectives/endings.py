"""Reads process.events: how processes of jobs ended, and which exit was the first failure of its run."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from probing.client.diagnosis.findings import ns_of
from probing.client.render.rows import Row, rows_of
from probing.client.times import Interval
from probing.client.zone import clock

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = ("MOST", "death_text", "ended", "ended_sql", "events", "exits", "exits_of", "how", "recent")

# Most rows of one answer; older ones are left out.
MOST = 1000
# The first failure of a run may lie this much further back, s.
_BEFORE_S = 86400
# A launcher polls its workers every 0.1 s or less often, and ends them one after the other.
_ORDER_NS = 50_000_000
_ORDERS = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP)
_EVENTS = f"""
SELECT ts, node, job, run, rank, role, pid, start_ns, event, exit_code, signal,
  {{recent}} AS recent
FROM process.events WHERE event IN ({{kinds}}) AND {{before}} AND {{where}}
ORDER BY ts DESC LIMIT {4 * MOST}
"""


def events(cluster: Cluster, where: str, during: Interval) -> list[Row]:
    """Returns the starts, exits and kills in the interval ``during``, oldest first, at most the MOST newest.

    Each has ``oom``, ``first`` (it is the exit that was the first failure of its run) and ``detail``. ``where`` is an
    SQL condition on process.events.
    """
    rows = _oldest_first(cluster.query(_sql(where, during, ("start", "identified", "exit", "oom_kill"))))
    rows = sorted([*_starts(cluster, rows, during), *rows], key=lambda row: str(row["ts"]))
    # The identity of a process may be known a moment after its start.
    newest = {_process(row): row for row in rows}
    for row in rows:
        row.update({name: newest[_process(row)][name] for name in ("job", "run", "rank", "role")})
    return recent(row for row in _described(rows) if row["event"] != "identified")


def _starts(cluster: Cluster, rows: list[Row], during: Interval) -> list[Row]:
    """Returns the starts of the processes of ``rows`` that are not among them: the job of a launcher is known from its
    ranks, after its start."""
    known = {_process(row) for row in rows if row["event"] == "start"}
    lacking = {_process(row) for row in rows} - known
    if not lacking:
        return []
    pids = ", ".join(sorted({str(pid) for _, pid, _ in lacking}))
    found = cluster.query(_sql(f"pid IN ({pids})", during, ("start",)))
    return [row for row in _oldest_first(found) if _process(row) in lacking]


def ended(cluster: Cluster, where: str, during: Interval) -> list[Row]:
    """Asks for ``exits``. ``where`` is an SQL condition on process.events."""
    return exits(cluster.query(ended_sql(where, during)))


def ended_sql(where: str, during: Interval) -> str:
    """The question of ``exits``."""
    return _sql(where, during, ("exit", "oom_kill"))


def exits(table: pa.Table) -> list[Row]:
    """Returns the exits, oldest first, with the columns of ``events`` and ``recent``: whether it was in the
    interval. The day before that is included."""
    return exits_of(_oldest_first(table))


def exits_of(rows: list[Row]) -> list[Row]:
    """As ``exits``; ``rows`` are those of ``ended_sql``, the oldest first."""
    return [row for row in _described(rows) if row["event"] == "exit"]


def recent(rows: Iterable[Row]) -> list[Row]:
    """Returns the recent ones of ``rows`` without the column ``recent``; at most the MOST newest."""
    return [{name: row[name] for name in row if name != "recent"} for row in rows if row["recent"]][-MOST:]


def _sql(where: str, during: Interval, kinds: tuple[str, ...]) -> str:
    before = Interval(during.begin.earlier(_BEFORE_S), during.end).sql()
    named = ", ".join(f"'{kind}'" for kind in kinds)
    return _EVENTS.format(kinds=named, recent=during.sql(), before=before, where=where)


def _oldest_first(table: pa.Table) -> list[Row]:
    return rows_of(table)[::-1]


def _described(rows: list[Row]) -> list[Row]:
    out_of_memory = {_process(row) for row in rows if row["event"] == "oom_kill"}
    for row in rows:
        row["oom"], row["first"] = _process(row) in out_of_memory, False
    for row in _firsts(rows):
        row["first"] = True
    for row in rows:
        row["detail"] = _detail(row)
    return rows


def how(row: Row) -> str:
    """Describes how a process ended, from ``exit_code``, ``signal`` and ``oom``."""
    if row["signal"] is not None:
        return f"killed by {_signal(row['signal'])}" + (" (OOM)" if row["oom"] else "")
    return "it is not known how" if row["exit_code"] is None else f"exited with code {row['exit_code']}"


def death_text(row: Row) -> str:
    """``rank 3 (pid 12 on alpha) was killed by SIGKILL (OOM) at 03:12:07Z``."""
    who = f"rank {row['rank']}" if row["rank"] is not None else str(row["role"])
    verb = "was " if row["signal"] is not None else ""
    return f"{who} (pid {row['pid']} on {row['node']}) {verb}{how(row)} at {clock(row['ts'])}"


def _detail(row: Row) -> str:
    if row["event"] == "start":
        return str(row["role"])
    if row["event"] == "oom_kill":
        return "the kernel was out of memory"
    return how(row) + (", first to fail" if row["first"] else "")


def _firsts(rows: Iterable[Row]) -> Iterable[Row]:
    """The first failure of each run; ``rows`` are ordered by time. A run that was asked to end as a whole has none."""
    runs: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row["event"] == "exit" and _failed(row):
            runs.setdefault((row["job"], row["run"]), []).append(row)
    return [failed[0] for failed in runs.values() if not _ordered(failed)]


def _ordered(failed: list[Row]) -> bool:
    """Whether a scheduler, launcher or user asked all trainers of a run at once to end, and none failed of itself.

    As diagnosis.deaths judges: a launcher that ends the others of a rank comes later than _ORDER_NS.
    """
    trainers = [row for row in failed if row["role"] == "trainer"]
    first = trainers[0] if trainers else failed[0]
    others = [row for row in trainers[1:] if row["node"] == first["node"]]
    at_once = not others or _ns(others[0]["ts"]) - _ns(first["ts"]) <= _ORDER_NS
    return len(trainers) > 1 and at_once and all(row["signal"] in _ORDERS for row in trainers)


def _ns(ts: str) -> int:
    return ns_of(ts) or 0


def _failed(row: Row) -> bool:
    if row["role"] == "data_loader" and row["signal"] == signals.SIGTERM:
        # A trainer ends a data loader in this way if it is slow to exit.
        return False
    return row["role"] != "other" and bool(row["signal"] or row["exit_code"])


def _process(row: Row) -> tuple[Any, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
