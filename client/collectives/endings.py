"""How processes of jobs ended, and which of a run was the first that failed: from process.events."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from probing.client.render.rows import Row, rows_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("MOST", "clock", "death_text", "ended", "events", "how", "recent", "when")

# Rows of one answer; older ones are left out.
MOST = 1000
# So much further back is looked for the first failure of a run.
_BEFORE_S = 86400
_EVENTS = f"""
SELECT ts, node, job, run, rank, role, pid, start_ns, event, exit_code, signal,
  ts > now() - INTERVAL {{since}} SECOND AS recent
FROM process.events WHERE event IN ({{kinds}}) AND ts > now() - INTERVAL {{before}} SECOND AND {{where}}
ORDER BY ts DESC LIMIT {4 * MOST}
"""


def events(cluster: Cluster, where: str, since: float) -> list[Row]:
    """Starts, exits and kills of the last ``since`` seconds, oldest first, with ``oom``, ``first`` and ``detail``.

    At most MOST, the newest ones. ``where`` is an SQL condition on process.events. ``first`` marks the exit that was
    the first failure of its run.
    """
    rows = _read(cluster, where, since, ("start", "identified", "exit", "oom_kill"))
    # Who it is may be known a moment after its start.
    newest = {_process(row): row for row in rows}
    for row in rows:
        row.update({name: newest[_process(row)][name] for name in ("job", "run", "rank", "role")})
    return recent(row for row in _described(rows) if row["event"] != "identified")


def ended(cluster: Cluster, where: str, since: float) -> list[Row]:
    """The exits among events, of a day before as well; ``recent``: it is of the last ``since`` seconds."""
    return [row for row in _described(_read(cluster, where, since, ("exit", "oom_kill"))) if row["event"] == "exit"]


def recent(rows: Iterable[Row]) -> list[Row]:
    """Those of ``rows`` that are recent, without ``recent``; at most MOST, the newest ones."""
    return [{name: row[name] for name in row if name != "recent"} for row in rows if row["recent"]][-MOST:]


def _read(cluster: Cluster, where: str, since: float, kinds: tuple[str, ...]) -> list[Row]:
    seconds = max(1, round(since))
    asked = {"kinds": ", ".join(f"'{kind}'" for kind in kinds), "since": seconds, "before": seconds + _BEFORE_S}
    return rows_of(cluster.query(_EVENTS.format(**asked, where=where)))[::-1]


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
    """How a process ended, in words, from ``exit_code``, ``signal`` and ``oom``."""
    if row["signal"] is not None:
        return f"killed by {_signal(row['signal'])}" + (" (OOM)" if row["oom"] else "")
    return "it is not known how" if row["exit_code"] is None else f"exited with code {row['exit_code']}"


def death_text(row: Row) -> str:
    """``rank 3 (pid 12 on alpha) was killed by SIGKILL (OOM) at 03:12:07Z``."""
    who = f"rank {row['rank']}" if row["rank"] is not None else str(row["role"])
    verb = "was " if row["signal"] is not None else ""
    return f"{who} (pid {row['pid']} on {row['node']}) {verb}{how(row)} at {clock(row['ts'])}"


def when(ts: str | None) -> str:
    """A time of ``rows_of`` to the second: ``2026-11-22 03:12:07Z``."""
    return "-" if ts is None else f"{ts[:19].replace('T', ' ')}Z"


def clock(ts: str | None) -> str:
    """As ``when``, of today without the date."""
    return when(ts).removeprefix(time.strftime("%Y-%m-%d ", time.gmtime()))


def _detail(row: Row) -> str:
    if row["event"] == "start":
        return str(row["role"])
    if row["event"] == "oom_kill":
        return "the kernel was out of memory"
    return how(row) + (", first to fail" if row["first"] else "")


def _firsts(rows: Iterable[Row]) -> Iterable[Row]:
    """The first failure of each run; ``rows`` are in the order of time."""
    found: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        if row["event"] == "exit" and _failed(row):
            found.setdefault((row["job"], row["run"]), row)
    return found.values()


def _failed(row: Row) -> bool:
    if row["role"] == "data_loader" and row["signal"] == signals.SIGTERM:
        # So does its trainer end one that is slow to leave.
        return False
    return row["role"] != "other" and bool(row["signal"] or row["exit_code"])


def _process(row: Row) -> tuple[Any, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
