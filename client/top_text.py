"""How a frame of ``top`` looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probing.client.nccl_text import ranks_text
from probing.client.render import Field, render
from probing.client.text import age, escape

__all__ = ("people",)

_FIELDS = (
    Field("RANK", "rank", right=True),
    Field("NODE", "node"),
    Field("PID", "pid", right=True),
    Field("STATE", "state"),
    Field("COLL/S", "collectives_per_s", lambda v: f"{v:.1f}", right=True),
    Field("LAG", "lag_ns", age, right=True),
    Field("IN FLIGHT", "inflight"),
    Field("AGE", "age_ns", age, right=True),
    Field("PYTHON (main thread)", "python", lambda v: v or "-", flex=True),
)
# Below this an operation in flight is everyday life and no reason to name who is not in it.
_NOTABLE_NS = 1_000_000_000


def people(ranks: Sequence[dict[str, Any]], missing: Sequence[str], width: int | None, lines: int | None) -> str:
    """One block a job. ``lines`` bounds the height; ranks that hold others up or lag are then shown first."""
    parts = [escape(f"missing: {what}") + "\n" for what in missing[:5]]
    if not ranks:
        return "".join(parts) + "(no training process)\n"
    jobs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in ranks:
        jobs.setdefault((row["job"], row["run"]), []).append(row)
    room = None if lines is None else max(1, (lines - len(parts) - 5 * len(jobs)) // len(jobs))
    parts.extend(_job(job, rows, width, room) for job, rows in jobs.items())
    return "\n".join(parts)


def _job(job: tuple[Any, ...], rows: list[dict[str, Any]], width: int | None, room: int | None) -> str:
    world = next((row["world_size"] for row in rows if row["world_size"] is not None), None)
    steps = [row["step"] for row in rows if row["step"] is not None]
    rate = sum(row["collectives_per_s"] for row in rows) / len(rows)
    head = f"job {job[0]}  run {job[1]}  {len(rows)} of {world or '?'} ranks  {rate:.1f} collectives/s a rank"
    if steps:
        last = [row["steps_per_s"] for row in rows if row["steps_per_s"]]
        head += f"  step {max(steps)}, {sum(last) / max(len(last), 1):.2f} a second"
    text = [head, *_waits(rows)]
    shown, note = rows, ""
    if room is not None and len(rows) > room:
        shown = sorted(rows, key=_notable)[:room]
        note = f"({len(rows) - room} more ranks)\n"
    cells = [{**row, "inflight": _inflight(row)} for row in shown]
    return "\n".join(map(escape, text)) + "\n" + render(_FIELDS, cells, width) + note


def _inflight(row: dict[str, Any]) -> str:
    return "-" if row["op"] is None else f"{row['op']} #{row['seq']}"


def _waits(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which ranks wait in what for how long, and which of the job's ranks here wait in nothing."""
    operations: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] is not None and (row["age_ns"] or 0) >= _NOTABLE_NS:
            operations.setdefault((row["comm"], row["seq"], row["op"]), []).append(row)
    idle = [row["rank"] for row in rows if row["op"] is None]
    lines = []
    for (comm, seq, op), waiting in operations.items():
        longest = age(max(row["age_ns"] for row in waiting))
        inside = ranks_text([row["rank"] for row in waiting])
        lines.append(f"  WAITING {longest} in {op} seq {seq} of {comm}: ranks {inside}")
    if lines and idle:
        lines.append(f"  in no collective: ranks {ranks_text(idle)}")
    return lines


def _notable(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["op"] is not None, row["state"] == "running", -(row["lag_ns"] or 0), row["rank"] or 0)
