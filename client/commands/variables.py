"""``vars``: values of variables, read once, or watched and stored from now on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from probing.api.errors import NotFound, UsageError, error_from
from probing.client.cluster import Cluster
from probing.client.commands.config import write_settings
from probing.client.commands.stacks import failure_text
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.render.text import age, escape
from probing.client.session import job_named, opened, sql_text, warn
from probing.client.settings import Settings

__all__ = ("run", "unwatch", "watch")

_FIELDS = (
    Field("RANK", "rank", right=True),
    Field("PID", "pid", right=True),
    Field("FUNC", "func", flex=True),
    Field("NAME", "name"),
    Field("TYPE", "type"),
    Field("VALUE", "shown", flex=True),
)
_WATCH, _INTERVAL = "variables.watch", "variables.interval_s"


def run(settings: Settings, names: Sequence[str], pids: Sequence[int], job: str) -> None:
    _require(names)
    with opened(settings) as cluster:
        found = cluster.variables(names, pids, job_named(cluster, job))
        if not found.values and found.failures:
            first = found.failures[0]
            raise error_from(first["kind"], failure_text(first), first["hint"])
        for failure in found.failures:
            warn(failure_text(failure))
        if not found.values:
            raise NotFound(
                f"no such variable was found: {', '.join(names)}",
                hint="`probingctl stacks --locals` shows the variables of each frame",
            )
        values = sorted(found.values, key=_order)
        if settings.format == "table":
            values = [{**value, "shown": _shown(value)} for value in values]
        write_table(settings, _FIELDS, values)


def watch(
    settings: Settings, names: Sequence[str], pids: Sequence[int], job: str, *, every: float | None, length: float
) -> None:
    """Values of ``names`` are stored from now on, for ``length`` seconds unless 0.

    ``every``: seconds between two readings of all watched variables; None leaves it as it is.
    """
    _require(names)
    for name in names:
        if "," in name:
            raise UsageError(f"{name}: a name has no comma", hint="give several names as several words")

    def change(cluster: Cluster, job: str) -> list[dict[str, Any]]:
        changed = [
            row for pid in pids or [0]
            for row in cluster.config(_WATCH, ",".join(names), job=job, pid=pid, seconds=length)
        ]  # fmt: skip
        # One for all watches of a node.
        return changed if every is None else changed + cluster.config(_INTERVAL, f"{every:g}", seconds=length)

    job = _change(settings, pids, job, change)
    if settings.format == "table":
        sys.stderr.write(_told(names, pids, job, every, length))


def unwatch(settings: Settings, names: Sequence[str], pids: Sequence[int], job: str) -> None:
    """What ``watch`` began with the same processes or job ends."""
    if names:
        raise UsageError("--unwatch takes no names", hint="it ends the watch of a job, a process, or everywhere")

    def change(cluster: Cluster, job: str) -> list[dict[str, Any]]:
        changed = [row for pid in pids or [0] for row in cluster.config(_WATCH, job=job, pid=pid, reset=True)]
        return changed if pids or job else changed + cluster.config(_INTERVAL, reset=True)

    _change(settings, pids, job, change)


def _change(
    settings: Settings, pids: Sequence[int], job: str, change: Callable[[Cluster, str], list[dict[str, Any]]]
) -> str:
    """The job that ``job`` names."""
    if pids and job:
        raise UsageError("--job and PID contradict each other", hint="a watch is for one job, some processes, or all")
    with opened(settings) as cluster:
        job = job_named(cluster, job)
        found = {(row["node"], row["key"], row["job"], row["pid"]): row for row in change(cluster, job)}
        write_settings(settings, list(found.values()))
    return job


def _require(names: Sequence[str]) -> None:
    if not names:
        raise UsageError("there is no name of a variable", hint="for example: probingctl vars --job 4711 loss step")


def _order(value: dict[str, Any]) -> tuple[Any, ...]:
    rank = value["rank"]
    return value["job"], rank is None, rank or 0, value["node"], value["pid"]


def _shown(value: dict[str, Any]) -> str:
    return f"({value['reason'] or 'not known'})" if value["value"] is None else str(value["value"])


def _told(names: Sequence[str], pids: Sequence[int], job: str, every: float | None, length: float) -> str:
    """What is stored from now on, and how to see it."""
    rate = "" if every is None else f" every {age(every * 1e9)}"
    end = f" for {age(length * 1e9)}" if length else " until --unwatch, or until the daemon restarts"
    where = [f"name IN ({', '.join(map(sql_text, names))})"]
    if job:
        where.append(f"job = {sql_text(job)}")
    if pids:
        where.append(f"pid IN ({', '.join(map(str, pids))})")
    sql = f"SELECT ts, rank, name, value FROM python.variables WHERE {' AND '.join(where)} ORDER BY ts DESC LIMIT 20"
    return escape(f"stored in python.variables{rate}{end}; to see it:") + f'\n  probingctl query "{escape(sql)}"\n'
