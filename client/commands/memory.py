"""``memory``: shows memory of host and GPU by rank, and which rank uses more than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer

from probing.api.text import escape, percent, size, sql_text
from probing.client.collectives.standing import standings, state_lines, state_rows, state_statements
from probing.client.gpus.readings import MEMORY, PROCESSES, READINGS, ask, device_key, fitting
from probing.client.options import Job, Wide
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, terminal_width, wrapped
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings
from probing.client.times import Bound, Interval

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl memory --all-nodes --job 4711", "probingctl memory --limit 10 -f json")
# Rows of memory and exits are read if they are younger than this.
_LATELY = Interval(Bound(120.0))
# A rank is reported if it uses at least this many times the median of its job, and at least this many bytes more.
_UNEVEN, _UNEVEN_BYTES = 1.2, 256_000_000


_FIELDS = (
    Field("NODE", "node"),
    Field("RANK", "rank", right=True),
    Field("ROLE", "role"),
    Field("PID", "pid", right=True),
    Field("STATE", "state"),
    Field("RSS", "rss_bytes", size, right=True),
    Field("SWAP", "swap_bytes", size, right=True),
    Field("GPU", "gpu", right=True),
    Field("GPU MEMORY", "device_bytes", size, right=True),
    Field("OF", "device_total_bytes", size, right=True),
    Field("USED", "device_used_pct", percent, right=True),
)
_KINDS = {"rss_bytes": "host memory", "device_bytes": "GPU memory"}


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    limit: Annotated[
        int | None,
        typer.Option(
            "-l", "--limit", min=1, metavar="N", help="Only the N processes of each job with the most memory."
        ),
    ] = None
    wide: Wide = False


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        found = ask(cluster, {"memory": MEMORY, "processes": PROCESSES, "readings": READINGS})
        of_job = "true" if job is None else f"job = {sql_text(job)}"
        states, _, ended = standings(*state_rows(cluster.query_all(state_statements(of_job, _LATELY))))
        gone = set(map(_key, ended))
        runs = _runs(found["memory"], found["processes"], found["readings"], job, options.limit)
        for process in (process for own in runs for process in own["processes"]):
            process["state"] = "ended" if _key(process) in gone else "running"
        if job is not None and not runs:
            require_live(cluster, job)
    width = None if options.wide or settings.output is not None else terminal_width()
    text = "\n".join(_text(own, state_lines(states, own["job"], own["run"]), width) for own in runs)
    flat = [{"job": own["job"], "run": own["run"], **process} for own in runs for process in own["processes"]]
    write_objects(settings, runs, text or "(no memory of a training process was read in the last minute)\n", flat)


def _runs(
    memory: Sequence[Row], processes: Sequence[Row], readings: Sequence[Row], job: str | None, limit: int | None
) -> list[Row]:
    """Returns each run with its ``processes`` and ``sentences``, as docs/json.md describes."""
    rows = {(row["node"], row["pid"], row["start_ns"]): _host(row) for row in memory}
    devices = {device_key(row): row for row in readings}
    for used in processes:
        if used["job"] is not None and used["role"] in ("trainer", "data_loader"):
            key = (used["node"], used["pid"], used["start_ns"])
            rows.setdefault(key, _host(used))["devices"].append(_device(used, devices.get(device_key(used))))
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows.values():
        if job is None or row["job"] == job:
            runs.setdefault((row["job"], row["run"]), []).append(_whole(row))
    return [_run(name, own, limit) for name, own in sorted(runs.items(), key=str)]


def _host(row: Row) -> Row:
    own = {name: row.get(name) for name in ("job", "run", "node", "pid", "start_ns", "rank", "role")}
    return {**own, "rss_bytes": row.get("rss_bytes"), "swap_bytes": row.get("swap_bytes"), "devices": []}


def _device(used: Row, reading: Row | None) -> Row:
    seen = reading or {}
    own = {name: used[name] for name in ("device_id", "mig", "uuid", "used_bytes")}
    return {**own, "total_bytes": seen.get("total_bytes"), "mem_used_pct": seen.get("mem_used_pct")}


def _whole(row: Row) -> Row:
    """Returns ``row`` with the memory of the process added up over all its GPUs."""
    used = [device["used_bytes"] for device in row["devices"] if device["used_bytes"] is not None]
    totals = [device["total_bytes"] for device in row["devices"] if device["total_bytes"]]
    fullest = [device["mem_used_pct"] for device in row["devices"] if device["mem_used_pct"] is not None]
    return {
        **row,
        "device_bytes": sum(used) if used else None,
        "device_total_bytes": sum(totals) if totals else None,
        "device_used_pct": max(fullest, default=None),
    }


def _run(name: tuple[str, str], rows: list[Row], limit: int | None) -> Row:
    sentences = [text for key, kind in _KINDS.items() for text in _imbalance(rows, key, kind)]
    ordered = sorted(rows, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["node"], row["pid"]))
    if limit is not None:
        ordered = sorted(rows, key=lambda row: -((row["rss_bytes"] or 0) + (row["device_bytes"] or 0)))[:limit]
    processes = [{key: value for key, value in row.items() if key not in ("job", "run")} for row in ordered]
    return {"job": name[0], "run": name[1], "sentences": sentences, "processes": processes}


def _imbalance(rows: Sequence[Row], key: str, kind: str) -> list[str]:
    """Returns a sentence if one of at least three trainers uses much more memory than their median."""
    known = {row["rank"]: row[key] for row in rows if row["role"] == "trainer" and row["rank"] is not None and row[key]}
    if len(known) < 3:
        return []
    usual, rank = median(known.values()), max(known, key=lambda one: known[one])
    most = known[rank]
    if most < _UNEVEN * usual or most - usual < _UNEVEN_BYTES:
        return []
    return [f"rank {rank} has {most / usual:.1f} times the median of {kind}: {size(most)}, the median is {size(usual)}"]


def _key(row: Row) -> tuple[object, ...]:
    return row["node"], row["pid"], row["start_ns"]


def _text(own: Row, lines_above: Sequence[str], width: int | None) -> str:
    told = [*lines_above, *own["sentences"]]
    head = [f"job {own['job'] or '-'}  run {own['run'] or '-'}", *(f"  {text}" for text in told)]
    lines = "".join(part + "\n" for line in head for part in wrapped(escape(line), width))
    rows = [{**row, "gpu": ",".join(_name(device) for device in row["devices"]) or None} for row in own["processes"]]
    ended = any(row["state"] == "ended" for row in rows)
    kept = [field for field in _FIELDS if ended or field.key != "state"]
    fields = fitting(kept, rows, width, spare=("node", "role", "device_total_bytes", "swap_bytes", "state"))
    return lines + render(fields, rows, width, bold=width is not None)


def _name(device: Row) -> str:
    return str(device["device_id"]) if device["mig"] is None else f"{device['device_id']}.{device['mig']}"
