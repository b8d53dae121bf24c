"""Reads the state of a run, without its operations: whether the run has ended, and its findings, first failure and
silent ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probing.api.text import plural
from probing.client.collectives.silence import Process, silence_lines
from probing.client.diagnosis.endings import death_text, ended_sql, exits
from probing.client.diagnosis.findings import OPEN, blamed, open_by_run, verdict_lines
from probing.client.render.rows import Row, rows_of
from probing.client.times import Interval
from probing.client.zone import clock

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = (
    "LAST_SEEN",
    "RECENT",
    "Run",
    "idle",
    "standing",
    "standing_lines",
    "standings",
    "state_lines",
    "state_rows",
    "state_statements",
    "states",
)

Run = tuple[Any, Any]
LAST_SEEN = "the run has ended: the values are the last that were seen"
# The processes that called an operation in the last 10 s. Their ranks are not silent.
RECENT = "SELECT DISTINCT node, pid FROM comm.ops WHERE ts > now() - INTERVAL 10 SECOND AND {of_job}"
_LIVE = """
SELECT node, job, run, rank, world_size, pid, start_ns, state FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {of_job}
"""
_NAMES = ("live trainers", "findings", "exits")


def state_statements(of_job: str, during: Interval) -> dict[str, str]:
    """Returns, by name, the SELECTs whose rows ``standings`` takes; ``of_job`` is a condition on the job."""
    statements = (_LIVE, OPEN, ended_sql(of_job, during))
    return {name: sql.format(of_job=of_job) for name, sql in zip(_NAMES, statements, strict=True)}


def state_rows(tables: Mapping[str, pa.Table]) -> tuple[list[Row], list[Row], list[Row]]:
    """Returns the rows of ``state_statements``: live trainers, findings, and exits."""
    live, findings, ended = (rows_of(tables[name]) for name in _NAMES)
    return live, findings, ended


def states(cluster: Cluster, of_job: str, during: Interval) -> dict[Run, Row]:
    """Returns the state of each run, with the keys of ``standing``."""
    return standings(*state_rows(cluster.query_all(state_statements(of_job, during))), now=during.open)[0]


def standing() -> Row:
    """Returns the empty state of a run, before any answer.

    ``ended``: when its last trainer ended, None while a trainer lives; ``first_failure``: the exit of the rank that
    failed first; ``silent``: rows of ``silence.silent``; ``silent_more``: the number of silent ranks without a row;
    ``findings``: the open findings about the run, the worst first.
    """
    return {"ended": None, "first_failure": None, "silent": [], "silent_more": 0, "findings": []}


def standings(
    live: Iterable[Row], findings: Sequence[Row], ended: Iterable[Row], *, now: bool = True
) -> tuple[dict[Run, Row], dict[Run, list[Row]], list[Row]]:
    """Returns the states by job and run, without silent ranks; the living trainers by job and run; and the exits.

    ``now`` False: the rows belong to a past interval, so the findings that are open now are left out.
    """
    found: dict[Run, Row] = {}
    trainers: dict[Run, list[Row]] = {}
    ends = exits(ended, findings)
    for row in ends:
        own = found.setdefault((row["job"], row["run"]), standing())
        if row["first"]:
            own["first_failure"] = {name: row[name] for name in row if name != "recent"}
        if row["role"] == "trainer":
            own["ended"] = row["ts"]
    for row in live:
        run = row["job"], row["run"]
        found.setdefault(run, standing())["ended"] = None
        trainers.setdefault(run, []).append(row)
    opened = open_by_run(findings) if now else {}
    for run, own in found.items():
        own["findings"] = opened.get(run, [])
    return found, trainers, ends


def idle(live: Sequence[Row], busy: Container[Process]) -> list[Row]:
    """Returns the trainers of one run that are not ``busy``, ordered by rank. The list is empty for a run of one rank,
    because such a run never waits.
    """
    if max(len(live), live[0]["world_size"] or 0) < 2:
        return []
    waiting = [row for row in live if (row["node"], row["pid"]) not in busy]
    return sorted(waiting, key=lambda row: (row["rank"] is None, row["rank"] or 0))


def standing_lines(own: Row) -> list[str]:
    """Returns the lines of text for a state, except what the lines of findings already say about ranks at fault."""
    said = blamed(own["findings"])
    lines = [] if own["ended"] is None else [f"ENDED {clock(own['ended'])}"]
    first = own["first_failure"]
    if first is not None and (own["ended"] is not None or (first["rank"], "rank_died") not in said):
        lines.append(f"FAILED FIRST: {death_text(first)}")
    lines += silence_lines(own["silent"], {rank for rank, _ in said})
    if own["silent_more"]:
        lines.append(f"{plural(own['silent_more'], 'more rank')} without an operation: see `probingctl stacks --merge`")
    return lines


def state_lines(found: Mapping[Run, Row], job: str | None, run: str | None) -> list[str]:
    """Returns the lines that a command prints above its rows of a run: the open findings, the end, and the first
    failure."""
    own = found.get((job, run)) or standing()
    ended = [LAST_SEEN] if own["ended"] is not None else []
    return [*verdict_lines(own["findings"]), *standing_lines(own), *ended]
