"""Finds the word for the state of each job, and the order of jobs and ranks: trouble first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probing.client.collectives.standing import Run
from probing.client.collectives.top_text import Frame, news
from probing.client.render.rows import Row

__all__ = ("LEVELS", "Job", "jobs_of")

# The order of jobs by the word for their state, the worst first.
LEVELS = {"STUCK": 0, "FAILED": 0, "SLOW": 1, "WARNING": 1, "WAITS": 1, "AWAY": 1, "PAUSED": 2, "OK": 3, "ENDED": 4}
# A wait is shown if its age exceeds both _LONG_NS and _USUAL times the usual interval between operations.
_LONG_NS = 5e9
_USUAL = 10
_NO_COLLECTIVE = "no collective ended lately"


@dataclass(frozen=True, slots=True)
class Job:
    """A run: its ``word`` from LEVELS, the ``lines`` about the run, and its ``ranks`` in the order of their numbers.

    ``verdicts``: the number of ``lines``, from the first on, that are findings. ``ended``: when the last rank ended,
    UTC; None while a rank lives. ``findings``: the open findings, the worst first.
    """

    job: str
    run: str
    word: str
    live: int
    world: int | None
    lines: tuple[str, ...]
    verdicts: int
    ranks: tuple[Row, ...]
    ended: str | None = None
    findings: tuple[Row, ...] = ()

    @property
    def level(self) -> int:
        return LEVELS[self.word]


def jobs_of(frame: Frame) -> tuple[Job, ...]:
    """Returns the living runs, the worst first, and after them the ended runs: failed runs before the other ended runs,
    and within both from the newest.

    Adds ``blame`` to each rank: ``culprit``, ``victim``, or empty.
    """
    own: dict[Run, list[Row]] = {}
    for row in frame.ranks:
        own.setdefault((row["job"], row["run"]), []).append(row)
    jobs = [_job(run, rows, frame) for run, rows in own.items()]
    # Living runs come first because nothing can be done about a run that has ended.
    newest = sorted(jobs, key=lambda job: job.ended or "", reverse=True)
    named = sorted(newest, key=lambda job: "" if job.ended else f"{job.job}\0{job.run}")
    return tuple(sorted(named, key=lambda job: (job.ended is not None, job.level)))


def _job(run: Run, rows: Sequence[Row], frame: Frame) -> Job:
    standing = frame.runs[run]
    live = [row for row in rows if row["ended"] is None]
    findings = standing["findings"]
    _blame(rows, findings)
    lines = _lines(run, [row for row in live if not row["away"]], frame)
    verdicts = sum(line.startswith("DIAGNOSIS") for line in lines)
    worlds = (row["world_size"] for row in live if row["world_size"] is not None)
    return Job(
        str(run[0]),
        str(run[1]),
        _word(live, standing, frame),
        len(live),
        next(worlds, None),
        tuple(lines),
        verdicts,
        tuple(rows),
        None if live else str(standing["ended"] or ""),
        tuple(findings),
    )


def _lines(run: Run, live: Sequence[Row], frame: Frame) -> list[str]:
    lines = news(run, live, frame)
    if all((row["world_size"] or 1) < 2 for row in live):
        # A job of one process never has collectives, so their absence is not mentioned.
        lines = [line.removeprefix(_NO_COLLECTIVE).removeprefix(", ") for line in lines]
    return [line for line in lines if line]


def _word(live: Sequence[Row], standing: Row, frame: Frame) -> str:
    if not live:
        return "FAILED" if standing["first_failure"] is not None else "ENDED"
    severities = {row["severity"] for row in standing["findings"]}
    waits = any(_waits(row) for row in live)
    if "error" in severities or standing["first_failure"] is not None:
        return "STUCK" if waits or not any(row["collectives_per_s"] for row in live) else "FAILED"
    if "warning" in severities:
        return "SLOW" if any("slow" in str(row["verdict"]) for row in standing["findings"]) else "WARNING"
    if any(row["away"] for row in live):
        return "AWAY"
    if any(row["node"] in frame.paused for row in live):
        return "PAUSED"
    return "WAITS" if waits else "OK"


def _waits(row: Row) -> bool:
    """Returns whether the rank is in an operation for much longer than the usual interval between operations."""
    usual = 1e9 / row["collectives_per_s"] if row["collectives_per_s"] else 0.0
    return row["op"] is not None and (row["age_ns"] or 0) > max(_LONG_NS, _USUAL * usual)


def _blame(rows: Iterable[Row], findings: Iterable[Row]) -> None:
    """Marks the ranks that findings name. A finding without ranks marks no rank."""
    culprits, victims = _numbers(findings, "ranks"), _numbers(findings, "victims")
    for row in rows:
        row["blame"] = "culprit" if row["rank"] in culprits else "victim" if row["rank"] in victims else ""


def _numbers(findings: Iterable[Row], name: str) -> set[int]:
    """Returns the ranks in texts of findings such as ``1,3`` and ``0-2``."""
    found: set[int] = set()
    for row in findings:
        for part in str(row.get(name) or "").split(","):
            first, dash, last = part.strip().partition("-")
            if first.isdigit() and (not dash or last.isdigit()) and len(first + last) < 12:
                found.update(range(int(first), min(int(last or first), int(first) + 65_535) + 1))
    return found
