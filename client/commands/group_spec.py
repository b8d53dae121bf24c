"""``group create``, ``set``, ``add`` and ``remove``: make or change the specification of a group, signed with the
user's key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import escape
from probing.client.commands.ranks_check import RANK_FIELDS
from probing.client.groups.changes import (
    Fields,
    chosen_workers,
    first_spec,
    next_spec,
    put,
    split,
    variables,
    with_fields,
    workers_in,
)
from probing.client.groups.records import GroupsSeen, seen
from probing.client.groups.rows import table_rows
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.times import seconds
from probing.groups.group import Group
from probing.groups.spec import Spec, checked

__all__ = ("EXAMPLES", "Options", "WorkerOptions", "add", "all_nodes", "change", "create", "remove", "write_ranks")

EXAMPLES = (
    "probingctl group create gpt --workers gn6-0,gn7-0 --master gn6-0 -- ./train",
    "probingctl group create gpt --workers 'gn*' --master gn6 --dry-run -- ./run",
    "probingctl group set gpt --master gn7 --env LR=0.1",
    "probingctl group add gpt gn8-0",
)
_RANKS = (*RANK_FIELDS, Field("BACKEND", "backend"))


@dataclass(frozen=True, slots=True)
class Options:
    """The fields of a specification. None: ``set`` keeps the present value, ``create`` takes the default."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Command that each worker runs.")
    ] = None
    workers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Workers NODE-N, patterns, or nodes with --nproc-per-node.")
    ] = None
    master: Annotated[str | None, typer.Option(metavar="NAME", help="The worker or node of rank 0.")] = None
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="Number of ranks; default: one for each worker.")
    ] = None
    master_port: Annotated[int | None, typer.Option(metavar="PORT", help="First port to try; default: 29500.")] = None
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="nccl (default) or gloo.")] = None
    nproc_per_node: Annotated[int | None, typer.Option(metavar="N", help="Workers for each node in --workers.")] = None
    nnodes: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Restart without failed nodes if MIN of MAX nodes are left.")
    ] = None
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable for all ranks; may be repeated.")] = (
        None
    )
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of the ranks; default: your home.")] = None
    restart: Annotated[str | None, typer.Option(metavar="WHEN", help="never (default), on_failure or always.")] = None
    max_restarts: Annotated[
        int | None, typer.Option(metavar="N", help="At most N automatic restarts in an hour; default: 3.")
    ] = None
    on_hang: Annotated[
        str | None, typer.Option(metavar="WHAT", help="report (default), restart or restart_without_node.")
    ] = None
    grace: Annotated[str | None, typer.Option(metavar="TIME", help="Time from SIGTERM to SIGKILL; default: 10s.")] = (
        None
    )
    fence: Annotated[
        str | None, typer.Option(metavar="TIME", help="A node cut off for this time ends its ranks; default: 60s.")
    ] = None
    save: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run this, or send SIGUSR1, before an automatic restart.")
    ] = None
    save_time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit of --save; default: 60s.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and change nothing.")] = False


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    workers: Annotated[list[str], typer.Argument(metavar="WORKER...", help="Workers NODE-N, or patterns.")]
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and change nothing.")] = False


def create(settings: Settings, options: Options) -> None:
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        spec = first_spec(cluster, groups, options.name, _fields(options))
        group = put(cluster, groups, spec, dry_run=options.dry_run)
    write_ranks(settings, group)


def change(settings: Settings, options: Options) -> None:
    _change(settings, options, lambda spec, groups: with_fields(spec, _fields(options), groups))


def add(settings: Settings, options: WorkerOptions) -> None:
    def added(spec: Spec, groups: GroupsSeen) -> Spec:
        more = chosen_workers(groups, options.workers, None)
        workers = (*spec.workers, *(worker for worker in more if worker not in spec.workers))
        return checked(replace(spec, workers=workers))

    _change(settings, options, added)


def remove(settings: Settings, options: WorkerOptions) -> None:
    def removed(spec: Spec, _groups: GroupsSeen) -> Spec:
        if absent := [word for word in options.workers if word not in spec.workers]:
            message = f"group {spec.name} has no worker {escape(absent[0], 80)}"
            raise UsageError(message, hint="`probingctl group status`")
        return checked(replace(spec, workers=tuple(one for one in spec.workers if one not in options.workers)))

    _change(settings, options, removed)


def write_ranks(settings: Settings, group: Group) -> None:
    write_table(settings, _RANKS, table_rows(group))


def all_nodes(settings: Settings) -> Settings:
    """Returns settings for all nodes, unless nodes were chosen."""
    return settings if settings.nodes or settings.where else replace(settings, all_nodes=True)


def _change(settings: Settings, options: Options | WorkerOptions, changed: Callable[[Spec, GroupsSeen], Spec]) -> None:
    with opened(all_nodes(settings)) as cluster:
        groups = seen(cluster)
        spec = changed(next_spec(cluster, groups, options.name), groups)
        group = put(cluster, groups, spec, dry_run=options.dry_run)
    write_ranks(settings, group)


def _fields(options: Options) -> Fields:
    def length(text: str | None) -> float | None:
        return None if text is None else seconds(text)

    return Fields(
        workers=None if options.workers is None else workers_in(options.workers),
        each_node=options.nproc_per_node,
        master=options.master,
        world_size=options.world_size,
        master_port=options.master_port,
        backend=options.backend,
        nnodes=options.nnodes,
        env=None if options.env is None else variables(options.env),
        cwd=options.cwd,
        command=options.command or None,
        restart=options.restart,
        max_restarts=options.max_restarts,
        on_hang=options.on_hang,
        grace_s=length(options.grace),
        fence_s=length(options.fence),
        save=None if options.save is None else split(options.save, "--save"),
        save_s=length(options.save_time),
    )
