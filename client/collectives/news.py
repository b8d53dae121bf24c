"""What a command that shows rows of jobs says above them: findings that are open, and that a job has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from probing.client.collectives.endings import ended_sql, exits
from probing.client.collectives.standing import LIVE, Run, standing, standing_lines, standings
from probing.client.diagnosis.findings import OPEN, open_by_run, verdict_lines
from probing.client.render.rows import Row, rows_of
from probing.client.times import Interval

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("LAST_SEEN", "lines_of", "statements", "states")

LAST_SEEN = "it has ended: the values are as they were last seen"
_NAMES = ("state_live", "state_findings", "state_ended")


def statements(of_job: str, during: Interval) -> dict[str, str]:
    """Returns the SELECTs by name whose answers ``states`` takes; ``of_job`` is a condition on the job."""
    statements = (LIVE, OPEN, ended_sql(of_job, during))
    return {name: sql.format(of_job=of_job) for name, sql in zip(_NAMES, statements, strict=True)}


def states(tables: Mapping[str, pa.Table], *, now: bool = True) -> dict[Run, Row]:
    """Returns ``standing.standing`` of each run. ``now`` False: of a past interval, so without what is so now."""
    live, findings = (rows_of(tables[name]) for name in _NAMES[:2])
    found, _ = standings(live, exits(tables[_NAMES[2]]), open_by_run(findings) if now else {})
    return found


def lines_of(found: Mapping[Run, Row], job: str | None, run: str | None) -> list[str]:
    """Returns the lines for a run: its open findings, its end, and the first failure."""
    own = found.get((job, run)) or standing()
    ended = [LAST_SEEN] if own["ended"] is not None else []
    return [*verdict_lines(own["findings"]), *standing_lines(own), *ended]
