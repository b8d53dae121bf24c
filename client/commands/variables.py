"""``vars``: shows values of variables once, or stores them from now on whenever they change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probing.api.errors import NotFound, UsageError
from probing.api.text import age, escape, sql_text
from probing.client.commands.config import write_settings
from probing.client.messages import Setting, Value
from probing.client.options import For, Job
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import job_named, opened, report_failures, warn
from probing.client.settings import Settings, process_id
from probing.client.times import seconds

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl vars --job 4711 step loss", "probingctl vars --job 4711 --watch loss --for 1h")
_FIELDS = (
    Field("RANK", "rank", right=True),
    Field("PID", "pid", right=True),
    Field("FUNC", "func", flex=True),
    Field("NAME", "name"),
    Field("TYPE", "type"),
    Field("VALUE", "shown", flex=True),
)
# The beginnings of the reasons that a node gives for an unknown name, which is neither a variable of a frame nor a
# module.
_NOWHERE = ("there is no variable ", "no module ")
_WATCH, _INTERVAL = "variables.watch", "variables.interval_s"


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments and options. ``words`` are pids and names of variables."""

    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PID]... NAME...", help="Names such as loss or trainer.state.step.")
    ] = None
    job: Job = None
    watch: Annotated[bool, typer.Option("--watch", help="Store the values whenever they change.")] = False
    unwatch: Annotated[bool, typer.Option("--unwatch", help="Stop storing the values.")] = False
    interval: Annotated[str | None, typer.Option(metavar="TIME", help="With --watch: time between two readings.")] = (
        None
    )
    for_: For = None


@dataclass(frozen=True, slots=True)
class _Watch:
    """A watch on variables of a job, of processes, or of all processes. Times are in seconds. With ``length`` 0 the
    watch lasts until it is removed.
    """

    names: tuple[str, ...]
    pids: tuple[int, ...]
    job: str
    every: float | None
    length: float


def run(settings: Settings, options: Options) -> None:
    if options.watch and options.unwatch:
        raise UsageError("--watch and --unwatch contradict each other")
    if not options.watch and (options.interval is not None or options.for_ is not None):
        raise UsageError("--interval and --for need --watch")
    words = options.words or ()
    names = tuple(word for word in words if not word.isdigit())
    pids = tuple(process_id(word) for word in words if word.isdigit())
    every = None if options.interval is None else seconds(options.interval)
    length = 0.0 if options.for_ is None else seconds(options.for_)
    _check(options, names, pids)
    with opened(settings) as cluster:
        watch = _Watch(names, pids, job_named(cluster, options.job or ""), every, length)
        if not options.watch and not options.unwatch:
            _read(settings, cluster, watch)
            return
        changed = _started(cluster, watch) if options.watch else _ended(cluster, watch)
        # Several changes may set the same setting; it is shown once.
        found = {(row["node"], row["key"], row["job"], row["pid"]): row for row in changed}
        write_settings(settings, list(found.values()))
    if options.watch and settings.format == "table":
        sys.stderr.write(_next_step(watch))


def _check(options: Options, names: Sequence[str], pids: Sequence[int]) -> None:
    if options.unwatch and names:
        raise UsageError(
            "--unwatch takes no names", hint="--unwatch ends all watches of a job, of a process, or of the node"
        )
    if not options.unwatch and not names:
        raise UsageError("there is no name of a variable", hint="for example: probingctl vars --job 4711 loss step")
    for name in names if options.watch else ():
        if "," in name:
            raise UsageError(
                f"{name}: the name of a variable cannot contain a comma", hint="separate names with spaces: loss step"
            )
    if (options.watch or options.unwatch) and pids and options.job:
        raise UsageError("--job and PID contradict each other", hint="a watch is for one job, some processes, or all")


def _read(settings: Settings, cluster: Cluster, wanted: _Watch) -> None:
    found = cluster.variables(wanted.names, wanted.pids, wanted.job)
    report_failures(found.failures, all_failed=not found.values)
    seen = {value["name"] for value in found.values if not _unknown(value)}
    if not seen:
        raise NotFound(
            f"no such variable was found: {', '.join(wanted.names)}",
            hint="`probingctl stacks --locals` shows the variables of each frame",
        )
    for name in wanted.names:
        if name not in seen:
            warn(f"no such variable was found: {name}")
    values = sorted(found.values, key=_order)
    if settings.format == "table":
        write_table(settings, _FIELDS, [{**value, "shown": _shown(value)} for value in values])
    else:
        write_table(settings, _FIELDS, values)


def _unknown(value: Value) -> bool:
    """Returns whether ``value`` says that no frame and no module of the process has the name."""
    return value["value"] is None and not value["func"] and (value["reason"] or "").startswith(_NOWHERE)


def _started(cluster: Cluster, watch: _Watch) -> list[Setting]:
    names, job, length = ",".join(watch.names), watch.job, watch.length
    changed = [
        row for pid in watch.pids or (0,) for row in cluster.config(_WATCH, names, job=job, pid=pid, seconds=length)
    ]
    # The interval is one setting for all watches of a node.
    return changed if watch.every is None else changed + cluster.config(_INTERVAL, f"{watch.every:g}", seconds=length)


def _ended(cluster: Cluster, watch: _Watch) -> list[Setting]:
    changed = [row for pid in watch.pids or (0,) for row in cluster.config(_WATCH, job=watch.job, pid=pid, reset=True)]
    return changed if watch.pids or watch.job else changed + cluster.config(_INTERVAL, reset=True)


def _order(value: Value) -> tuple[Any, ...]:
    rank = value["rank"]
    return value["job"], rank is None, rank or 0, value["node"], value["pid"]


def _shown(value: Value) -> str:
    return f"({value['reason'] or 'not known'})" if value["value"] is None else str(value["value"])


def _next_step(watch: _Watch) -> str:
    """Returns a text with the table in which the values are stored, for how long, and a query that shows them."""
    rate = "" if watch.every is None else f" every {age(watch.every * 1e9)}"
    end = f" for {age(watch.length * 1e9)}" if watch.length else " until --unwatch, or until the daemon restarts"
    where = [f"name IN ({', '.join(map(sql_text, watch.names))})"]
    if watch.job:
        where.append(f"job = {sql_text(watch.job)}")
    if watch.pids:
        where.append(f"pid IN ({', '.join(map(str, watch.pids))})")
    sql = f"SELECT ts, rank, name, value FROM python.variables WHERE {' AND '.join(where)} ORDER BY ts DESC LIMIT 20"
    return escape(f"stored in python.variables{rate}{end}; to see it:") + f'\n  probingctl query "{escape(sql)}"\n'
