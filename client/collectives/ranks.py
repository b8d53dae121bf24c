"""Builds one row for each trainer, and the state of its run, from the answers of nodes; for ``top``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from probing.client.collectives.silence import Process
from probing.client.collectives.standing import Run, idle, standings
from probing.client.diagnosis.endings import how
from probing.client.render.rows import Record, Row

__all__ = ("PHASES", "RANK_FIELDS", "Seen", "process_of", "rank_rows", "sinking")

PHASES = """
SELECT DISTINCT node, job, run, pid, phase FROM comm.progress WHERE phase IS NOT NULL AND ended IS NULL AND {where}
"""
"""SQL for the label ``phase`` of each process that has this label; the caller fills in ``{where}``."""
RANK_FIELDS = (
    "node",
    "job",
    "run",
    "rank",
    "world_size",
    "pid",
    "start_ns",
    "state",
    "collectives_per_s",
    "last_age_ns",
    "step",
    "steps_per_s",
    "step_age_ns",
    "lag_ns",
    "comm",
    "op",
    "seq",
    "age_ns",
    "python",
    "phase",
    "waits_in",
    "began_unseen",
    "unseen_until",
    "ended",
    "how",
    "first",
    "diagnosis",
)
# A rate that has fallen to the last known rate divided by this number, or below, is shown as 0.
_STANDS = 10
_LATE_NS = 3e9
_USUAL_STEPS = 3
_ENDS = ("ended", "how", "first")
_SILENCE = ("waits_in", "began_unseen", "unseen_until")


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of nodes. ``live`` (trainers), ``findings`` and ``ended`` are the arguments of ``standings``.

    The other fields are keyed by process: ``calls`` has collectives_per_s and last_age_ns, ``steps`` has step,
    steps_per_s and step_age_ns, ``inflight`` the oldest operation in flight, ``lags`` the worst lag, ns, ``python`` the
    innermost frame as text, ``phases`` the label ``phase``. A process whose last call is older than ``recent_ns`` may
    be silent.
    """

    live: Sequence[Row]
    findings: Sequence[Row]
    ended: Sequence[Row]
    calls: Mapping[Process, Row] = field(default_factory=dict)
    steps: Mapping[Process, Row] = field(default_factory=dict)
    inflight: Mapping[Process, Row] = field(default_factory=dict)
    lags: Mapping[Process, int] = field(default_factory=dict)
    python: Mapping[Process, str] = field(default_factory=dict)
    phases: Mapping[Process, str] = field(default_factory=dict)
    recent_ns: float = math.inf


def rank_rows(seen: Seen, silent: Callable[[list[Row]], list[Row]]) -> tuple[list[Row], dict[Run, Row]]:
    """Returns a row with RANK_FIELDS for each trainer, in the order of job, run and rank, and the state of each run
    (``standing.standing``).

    ``silent`` is called with the trainers that show no operation and returns rows of ``silence.silent``.
    """
    runs, trainers, exits = standings(seen.live, seen.findings, seen.ended)
    lately = (key for key, row in seen.calls.items() if (row["last_age_ns"] or 0) <= seen.recent_ns)
    busy = {*lately, *seen.inflight}
    waiting = [row for own in trainers.values() for row in idle(own, busy)]
    quiet = _quiet(runs, waiting, silent(waiting))
    ranks = [_rank(row, seen, quiet) for row in seen.live]
    ranks += _ended([row for row in exits if row["recent"] or (row["job"], row["run"]) in trainers], ranks)
    for row in ranks:
        worst = runs[row["job"], row["run"]]["findings"]
        row["diagnosis"] = worst[0]["sentence"] if worst else None
    ranks.sort(key=lambda r: (r["job"], r["run"], r["rank"] is None, r["rank"] or 0, r["node"], r["pid"]))
    return ranks, runs


def process_of(row: Record) -> Process:
    return row["node"], row["pid"]


def _rank(row: Row, seen: Seen, quiet: Mapping[Process, Row]) -> Row:
    key = process_of(row)
    calls, step, now, wait = (found.get(key) for found in (seen.calls, seen.steps, seen.inflight, quiet))
    return {
        **row,
        "collectives_per_s": calls["collectives_per_s"] if calls else 0.0,
        "last_age_ns": calls["last_age_ns"] if calls else None,
        **{name: step[name] if step else None for name in ("step", "step_age_ns")},
        "steps_per_s": sinking(step["steps_per_s"], step["step_age_ns"]) if step else None,
        "lag_ns": seen.lags.get(key),
        **{name: now[name] if now else None for name in ("comm", "op", "seq", "age_ns")},
        "python": seen.python.get(key),
        "phase": seen.phases.get(key),
        **{name: wait[name] if wait else None for name in _SILENCE},
        **dict.fromkeys(_ENDS),
    }


def sinking(rate: float | None, age_ns: float | None) -> float | None:
    """Returns the step rate to show, per second. At first it is ``rate``, the last known rate, because rows of steps
    arrive some seconds late. If no further step ends, the shown rate falls to 1 / ``age_ns``. Once 1 / ``age_ns`` is at
    most a tenth of ``rate``, the shown rate is 0.

    ``age_ns``: the time since the end of the last step.
    """
    if not rate or age_ns is None or age_ns <= max(_LATE_NS, _USUAL_STEPS * 1e9 / rate):
        return rate
    now = 1e9 / age_ns
    return now if now * _STANDS > rate else 0.0


def _quiet(runs: Mapping[Run, Row], waiting: Sequence[Row], found: list[Row]) -> dict[Process, Row]:
    """Adds the rows of silent ranks to their runs, counts the other waiting ranks, and returns the rows by process."""
    for row in found:
        runs[row["job"], row["run"]]["silent"].append(row)
    quiet = {process_of(row): row for row in found}
    for row in waiting:
        if process_of(row) not in quiet:
            runs[row["job"], row["run"]]["silent_more"] += 1
    return quiet


def _ended(ends: Sequence[Row], live: Sequence[Row]) -> list[Row]:
    """Returns the trainers that have ended, with the fields of living trainers."""
    nothing: Row = dict.fromkeys(RANK_FIELDS)
    alive = {process_of(row) for row in live}
    return [
        {
            **nothing,
            **{name: row[name] for name in ("node", "job", "run", "rank", "pid", "start_ns", "first")},
            "state": "exited",
            "collectives_per_s": 0.0,
            "ended": row["ts"],
            "how": how(row),
        }
        for row in ends
        if row["role"] == "trainer" and process_of(row) not in alive
    ]
