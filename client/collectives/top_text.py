"""Formats a frame of ``top`` as text."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probing.api.text import age, escape, ranks_of
from probing.client.collectives.in_flight import NOTABLE_NS, not_joined
from probing.client.collectives.standing import Run, standing_lines
from probing.client.diagnosis.findings import verdict_lines
from probing.client.render.rows import Row
from probing.client.render.table import Field, Grid, render, wrapped

if TYPE_CHECKING:
    from probing.diagnosis.wait_graph import Pending

__all__ = ("Frame", "news", "people")

_FIELDS = (
    Field("RANK", "rank", right=True),
    Field("NODE", "node"),
    Field("PID", "pid", right=True),
    Field("STATE", "state"),
    Field("COLL/S", "collectives_per_s", lambda v: "-" if v is None else f"{v:.1f}", right=True),
    Field("LAG", "lag_ns", age, right=True),
    Field("IN FLIGHT", "inflight"),
    Field("AGE", "shown_age_ns", age, right=True),
    Field("PYTHON (training thread)", "python", lambda v: v or "-", flex=True),
)
# Columns that are left out, in this order, if the table is too wide and all rows have the given value.
_SPARE = (("state", "running"), ("inflight", "-"), ("shown_age_ns", None))
# A job stands still if the age of its last operation exceeds both _STILL_NS and _USUAL times the usual interval between
# operations.
_USUAL = 10
_STILL_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Frame:
    """The data of one frame. ``ranks`` has a dict for each trainer, as docs/json.md describes. ``runs`` (the states of
    ``standing.standing``) and ``pending`` (the operations in flight) are keyed by job and run.

    ``paused``: a line for each paused node; ``missing``: lines that say what could not be asked.
    """

    ranks: list[Row]
    runs: dict[Run, Row]
    pending: Mapping[Run, Sequence[Pending]] = field(default_factory=dict)
    paused: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def people(frame: Frame, width: int | None, lines: int | None) -> str:
    """Returns the frame as text, with one block for each job. If ``lines`` limits the height, ranks without an
    operation and ranks that lag come first.
    """
    parts = [escape(f"missing: {what}") + "\n" for what in frame.missing[:5]]
    if not frame.ranks:
        return "".join(parts) + f"(no training process{' on the nodes that answered' if frame.missing else ''})\n"
    jobs: dict[Run, list[Row]] = {}
    # Live jobs come first.
    for row in sorted(frame.ranks, key=lambda row: frame.runs[row["job"], row["run"]]["ended"] is not None):
        jobs.setdefault((row["job"], row["run"]), []).append(row)
    room = None if lines is None else max(1, (lines - len(parts) - 6 * len(jobs)) // len(jobs))
    parts.extend(_job(run, rows, frame, width, room) for run, rows in jobs.items())
    return "\n".join(parts)


def _job(run: Run, rows: list[Row], frame: Frame, width: int | None, room: int | None) -> str:
    live = [row for row in rows if row["ended"] is None]
    world = next((row["world_size"] for row in live if row["world_size"] is not None), None)
    number = f"{len(live)} of {world or '?'} ranks" if live else f"{len(rows)} ranks (ended)"
    text = [f"job {run[0]}  run {run[1]}  {number}", *(f"  {line}" for line in news(run, live, frame))]
    head = "".join(line + "\n" for part in text for line in wrapped(escape(part), width))
    if not live:
        return head
    shown, note = rows, ""
    if room is not None and len(rows) > room:
        shown = sorted(rows, key=_notable)[:room]
        note = f"({len(rows) - room} more ranks)\n"
    return head + _table([{**row, **_shown(row, frame)} for row in shown], width) + note


def news(run: Run, live: Sequence[Row], frame: Frame) -> list[str]:
    """Returns the lines that stand above the ranks of a run: findings, speed, phases, waits, silent ranks, the end."""
    standing = frame.runs[run]
    pace = _pace(live) if live else None
    if any(row["node"] in frame.paused for row in live):
        pace = "PAUSED: the speed of the job is not seen"
    explained = {row["rank"] for row in standing["silent"]}
    verdicts = verdict_lines(standing["findings"])
    waits = _waits(frame.pending.get(run, ()), live, explained)
    return [*verdicts, *([pace] if pace else []), *_phases(live), *waits, *standing_lines(standing)]


def _phases(live: Sequence[Row]) -> list[str]:
    """Returns a line for each value of the label ``phase``."""
    ranks: dict[str, list[int | None]] = {}
    for row in live:
        if row.get("phase"):
            ranks.setdefault(row["phase"], []).append(row["rank"])
    return [f"phase {phase}: {ranks_of(numbers)}" for phase, numbers in sorted(ranks.items())]


def _pace(live: Sequence[Row]) -> str:
    """Returns the speed of the job as text, or how long the job has stood still."""
    ages = [row["last_age_ns"] for row in live if row["last_age_ns"] is not None]
    rates = [row["collectives_per_s"] for row in live if row["collectives_per_s"] is not None]
    rate = sum(rates) / max(len(rates), 1)
    interval = 1e9 / rate if rate else 0.0
    still = not ages or min(ages) > max(_STILL_NS, _USUAL * interval)
    if not ages:
        pace = "no collective ended lately"
    elif still or not rates:
        pace = f"no collective for {age(min(ages))}"
    else:
        pace = f"{rate:.1f} collectives/s a rank"
    stepped = [row for row in live if row["step"] is not None]
    if not stepped:
        return pace
    last = max(stepped, key=lambda row: int(row["step"]))
    since, paces = last["step_age_ns"] or 0, [row["steps_per_s"] for row in stepped if row["steps_per_s"]]
    usual = 1e9 * len(paces) / sum(paces) if paces else 0
    if still or since > max(_STILL_NS, 3 * usual):
        return f"{pace}, step {last['step']}, {age(since)} ago"
    return f"{pace}, step {last['step']}, {sum(paces) / max(len(paces), 1):.2f} a second"


def _table(rows: Sequence[Row], width: int | None) -> str:
    fields: Sequence[Field] = _FIELDS
    for key, value in _SPARE:
        if width is not None and Grid(fields, rows, None).width > width and all(row[key] == value for row in rows):
            fields = [field for field in fields if field.key != key]
    return render(fields, rows, width)


def _shown(row: Row, frame: Frame) -> Row:
    """Returns the values that the table shows in addition to, or instead of, the values of a rank's row."""
    shown: Row = {"inflight": "-", "shown_age_ns": None}
    if row["ended"] is not None:
        shown["python"] = row["how"]
    elif row["node"] in frame.paused:
        shown["collectives_per_s"] = None
    elif row["op"] is not None and (row["age_ns"] or 0) >= NOTABLE_NS:
        shown = {"inflight": f"{row['op']} #{row['seq']}", "shown_age_ns": row["age_ns"]}
    return shown


def _waits(pending: Sequence[Pending], live: Sequence[Row], explained: Container[int]) -> list[str]:
    """Returns a line for each operation in flight that is the oldest operation of some rank. A last line names the
    awaited ranks that are in none of these operations, except the ranks in ``explained``."""
    oldest = {(row["comm"], row["seq"], row["op"]) for row in live}
    shown = [one for one in pending if (one.comm, one.seq, one.op) in oldest]
    lines = [
        f"WAITING {age(one.age_ns)} in {one.op} seq {one.seq} of {_group(str(one.comm))}: {ranks_of(one.waiters)}"
        for one in shown
    ]
    lacking = [rank for rank in sorted(not_joined(shown)) if rank not in explained]
    return [*lines, f"in no collective: {ranks_of(lacking)}"] if lacking else lines


def _group(comm: str) -> str:
    """Returns the name of a communicator; groups without a name have the number that torch gives them."""
    return f"group {comm}" if comm.isdigit() else comm


def _notable(row: Row) -> tuple[Any, ...]:
    return (row["op"] is not None, row["state"] == "running", -(row["lag_ns"] or 0), row["rank"] or 0)
