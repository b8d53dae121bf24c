"""State of a run beyond its operations: live or ended, the first failure, the silent ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from probing.api.text import plural
from probing.client.collectives.endings import death_text
from probing.client.collectives.silence import Process, silence_lines
from probing.client.diagnosis.findings import Verdicts, blamed
from probing.client.render.rows import Row
from probing.client.zone import clock

__all__ = ("LIVE", "RECENT", "Run", "idle", "standing", "standing_lines", "standings")

Run = tuple[Any, Any]
LIVE = """
SELECT node, job, run, rank, world_size, pid, start_ns, state FROM process.processes
WHERE role = 'trainer' AND state <> 'exited' AND {of_job}
"""
# A rank that ended an operation in this time is not silent.
RECENT = "SELECT DISTINCT node, pid FROM comm.ops WHERE ts > now() - INTERVAL 10 SECOND AND {of_job}"


def standing() -> Row:
    """Returns the state of a run of which nothing is known yet.

    ``ended``: when its last trainer ended, None while one lives; ``first_failure``: the exit that failed first;
    ``silent``: rows of ``silence.silent``; ``silent_more``: the number of silent ranks without a row; ``findings``:
    what the daemon finds wrong with it now, the worst first.
    """
    return {"ended": None, "first_failure": None, "silent": [], "silent_more": 0, "findings": []}


def standings(
    live: Iterable[Row], exits: Sequence[Row], verdicts: Verdicts
) -> tuple[dict[Run, Row], dict[Run, list[Row]]]:
    """Returns ``standing`` by job and run, without silent ranks, and the live trainers by job and run.

    ``live`` are rows of LIVE, ``exits`` rows of ``endings.exits``, ``verdicts`` the open findings.
    """
    found: dict[Run, Row] = {}
    trainers: dict[Run, list[Row]] = {}
    for row in exits:
        own = found.setdefault((row["job"], row["run"]), standing())
        if row["first"]:
            own["first_failure"] = {name: row[name] for name in row if name != "recent"}
        if row["role"] == "trainer":
            own["ended"] = row["ts"]
    for row in live:
        run = row["job"], row["run"]
        found.setdefault(run, standing())["ended"] = None
        trainers.setdefault(run, []).append(row)
    for run, own in found.items():
        own["findings"] = verdicts.get(run, [])
    return found, trainers


def idle(live: Sequence[Row], busy: Container[Process]) -> list[Row]:
    """Returns the trainers of one run that are not ``busy``, by rank; none for a run of one rank, which never waits."""
    if max(len(live), live[0]["world_size"] or 0) < 2:
        return []
    found = [row for row in live if (row["node"], row["pid"]) not in busy]
    return sorted(found, key=lambda row: (row["rank"] is None, row["rank"] or 0))


def standing_lines(own: Row) -> list[str]:
    """Returns ``standing`` as lines of text, without what a line of a finding says of the ranks at fault."""
    said = blamed(own["findings"])
    lines = [] if own["ended"] is None else [f"ENDED {clock(own['ended'])}"]
    first = own["first_failure"]
    if first is not None and (own["ended"] is not None or (first["rank"], "rank_died") not in said):
        lines.append(f"FAILED FIRST: {death_text(first)}")
    lines += silence_lines(own["silent"], {rank for rank, _ in said})
    if own["silent_more"]:
        lines.append(f"{plural(own['silent_more'], 'more rank')} without an operation: see `probingctl stacks --merge`")
    return lines
