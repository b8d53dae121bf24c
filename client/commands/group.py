"""``group start``, ``stop``, ``restart`` and ``delete`` sign and send an order for a group; ``status`` and ``logs``
show groups and the output of ranks.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from probing.api.text import escape
from probing.client.commands.group_spec import all_nodes, write_ranks
from probing.client.groups.orders import begin, end, outcome, planned, refusal
from probing.client.groups.records import GroupsSeen, living_groups, named, node_of_rank, seen
from probing.client.groups.rows import group_row, rank_rows
from probing.client.render.output import write_objects
from probing.client.render.table import Field, render, terminal_width
from probing.client.session import hint, opened, warn
from probing.client.settings import Settings
from probing.client.zone import clock
from probing.groups.group import Action, Group
from probing.groups.keys import OwnerKey

__all__ = (
    "EXAMPLES",
    "LogOptions",
    "Options",
    "StartOptions",
    "StatusOptions",
    "delete",
    "key",
    "logs",
    "restart",
    "start",
    "status",
    "stop",
)

EXAMPLES = (
    "probingctl group start llama",
    "probingctl group restart llama --without gn7",
    "probingctl group status llama",
    "probingctl group logs llama --rank 3 --follow",
    "probingctl group stop llama",
)
_GROUPS = (
    Field("GROUP", "group"),
    Field("OWNER", "owner"),
    Field("PHASE", "phase"),
    Field("SINCE", "since", clock),
    Field("GENERATION", "generation", right=True),
    Field("RANKS", "ranks", right=True),
    Field("MASTER", "master"),
    Field("WHY", "why", flex=True),
)
_RANKS = (
    Field("RANK", "rank", right=True),
    Field("WORKER", "worker"),
    Field("LAUNCHER", "launcher"),
    Field("STATE", "state"),
    Field("SINCE", "since", clock),
    Field("PID", "pid", right=True),
    Field("EXIT", "exit_code", right=True),
    Field("WHY", "reason", flex=True),
    Field("LOG", "log", flex=True),
)
_LOG_BYTES, _FOLLOW_S = 64 << 10, 0.5


@dataclass(frozen=True, slots=True)
class Options:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]


@dataclass(frozen=True, slots=True)
class StartOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    without: Annotated[list[str] | None, typer.Option(metavar="NODE", help="Leave this node out; may be repeated.")] = (
        None
    )
    force: Annotated[bool, typer.Option("--force", help="Start even if a check of the nodes fails.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and start nothing.")] = False


@dataclass(frozen=True, slots=True)
class StatusOptions:
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The group; default: one line for each group.")
    ] = None


@dataclass(frozen=True, slots=True)
class LogOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    rank: Annotated[int, typer.Option(min=0, metavar="R", help="The rank; default: 0.")] = 0
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=1, metavar="N", help="Show at most the last N lines; default: 40.")
    ] = 40
    follow: Annotated[bool, typer.Option("--follow", help="Show new lines until Ctrl-C.")] = False


def start(settings: Settings, options: StartOptions) -> None:
    _begin(settings, options, "start")


def restart(settings: Settings, options: StartOptions) -> None:
    _begin(settings, options, "restart")


def stop(settings: Settings, options: Options) -> None:
    _end(settings, options, "stop")


def delete(settings: Settings, options: Options) -> None:
    _end(settings, options, "delete")


def status(settings: Settings, options: StatusOptions) -> None:
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        chosen = living_groups(groups) if options.name is None else [named(groups, options.name)]
    rows = [group_row(groups, group) for group in chosen]
    width = terminal_width() if settings.output is None else None
    text = render(_GROUPS, rows, width, bold=width is not None)
    objects = [{**row, "workers": rank_rows(groups, group)} for row, group in zip(rows, chosen, strict=True)]
    if options.name is not None:
        text += "\n" + render(_RANKS, objects[0]["workers"], width, bold=width is not None)
    elif not rows:
        text += "(no groups)\n"
    write_objects(settings, objects, text, rows)


def logs(settings: Settings, options: LogOptions) -> None:
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        group = named(groups, options.name)
        node = node_of_rank(cluster, groups, group, options.rank)
        data, position = node.group_log(group.spec.name, options.rank, -_LOG_BYTES)
        lines = data.splitlines(keepends=True)[-options.lines :]
        _write_log(b"".join(lines))
        while options.follow:
            time.sleep(_FOLLOW_S)
            # Outcomes are dropped, because they hold the parts of the log that were read and would fill the memory.
            node.outcomes.clear()
            data, position = node.group_log(group.spec.name, options.rank, position)
            _write_log(data)


def key(settings: Settings) -> None:
    del settings
    sys.stdout.write(f"{OwnerKey.of_user().public}\n")


def _write_log(data: bytes) -> None:
    """Writes a part of a log; characters that could steer the terminal are escaped."""
    for line in data.splitlines(keepends=True):
        text = line.rstrip(b"\r\n")
        sys.stdout.write(escape(text) + ("\n" if text != line else ""))
    sys.stdout.flush()


def _begin(settings: Settings, options: StartOptions, action: Action) -> None:
    without = tuple(options.without or ())
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        group = named(groups, options.name)
        if options.dry_run:
            write_ranks(settings, planned(group, without))
            return
        begun = begin(cluster, groups, group, action, without, force=options.force)
        for failure in begun.failures:
            warn(f"{failure.check}: {failure.text}")
        if begun.group is None:
            raise refusal(group, begun.failures)
    _write(settings, groups, begun.group, action)
    name = group.spec.name
    hint(f"`probingctl group status {name}` shows the ranks, `probingctl diagnose --job {name}` what is wrong")


def _end(settings: Settings, options: Options, action: Action) -> None:
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        ended = end(cluster, groups, named(groups, options.name), action)
    _write(settings, groups, ended, action)


def _write(settings: Settings, groups: GroupsSeen, group: Group, action: Action) -> None:
    rows = [group_row(groups, group)]
    write_objects(settings, rows, f"group {group.spec.name}: {outcome(group, action)}\n", rows)
