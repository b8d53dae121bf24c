"""``group start``, ``stop``, ``restart``, ``delete`` and ``status``: the orders of a group's owner, and its ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape, plural, utc
from probing.client.commands.group_spec import write_ranks
from probing.client.groups import GroupsSeen, clashes, named, node_named, seen, sent
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, terminal_width
from probing.client.session import hint, opened, warn
from probing.client.settings import Settings
from probing.client.zone import clock
from probing.groups.group import Action, Group, order_of
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
_LIVING = ("starting", "running", "ending")
_LOG_BYTES, _FOLLOW_S = 64 << 10, 0.5


@dataclass(frozen=True, slots=True)
class Options:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]


@dataclass(frozen=True, slots=True)
class StartOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    without: Annotated[list[str] | None, typer.Option(metavar="NODE", help="Leave this node out; repeat.")] = None
    force: Annotated[bool, typer.Option("--force", help="Start although a check of the nodes fails.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and start nothing.")] = False


@dataclass(frozen=True, slots=True)
class StatusOptions:
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The group; default: all, in a line each.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class LogOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    rank: Annotated[int, typer.Option(min=0, metavar="R", help="The rank; default: 0.")] = 0
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, metavar="N", help="Last lines; default: 40.")] = 40
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new lines until Ctrl-C.")] = False


def start(settings: Settings, options: StartOptions) -> None:
    _begin(settings, options, "start")


def restart(settings: Settings, options: StartOptions) -> None:
    _begin(settings, options, "restart")


def stop(settings: Settings, options: Options) -> None:
    groups = seen(settings)
    group = named(groups, options.name)
    if group.phase == "stopped":
        raise UsageError(f"group {group.spec.name} is stopped", hint=f"probingctl group status {group.spec.name}")
    _order(settings, groups, group, "stop")


def delete(settings: Settings, options: Options) -> None:
    groups = seen(settings)
    _order(settings, groups, named(groups, options.name), "delete")


def status(settings: Settings, options: StatusOptions) -> None:
    groups = seen(settings)
    chosen = (
        [group for _, group in sorted(groups.groups.items()) if group.phase != "deleted"]
        if options.name is None
        else [named(groups, options.name)]
    )
    rows = [_row(groups, group) for group in chosen]
    width = terminal_width() if settings.output is None else None
    text = render(_GROUPS, rows, width, bold=width is not None)
    objects = [{**row, "workers": _rank_rows(groups, group)} for row, group in zip(rows, chosen, strict=True)]
    if options.name is not None:
        text += "\n" + render(_RANKS, objects[0]["workers"], width, bold=width is not None)
    elif not rows:
        text += "(no groups)\n"
    write_objects(settings, objects, text, rows)


def logs(settings: Settings, options: LogOptions) -> None:
    groups = seen(settings)
    group = named(groups, options.name)
    rank = next((rank for rank in group.ranks() if rank.rank == options.rank), None)
    if rank is None:
        raise UsageError(f"group {group.spec.name} has no rank {options.rank}", hint=f"0 to {len(group.ranks()) - 1}")
    with node_named(settings, groups, rank.node) as cluster:
        data, end = cluster.group_log(group.spec.name, rank.rank, -_LOG_BYTES)
        lines = data.splitlines(keepends=True)[-options.lines :]
        _write_log(b"".join(lines))
        while options.follow:
            time.sleep(_FOLLOW_S)
            data, end = cluster.group_log(group.spec.name, rank.rank, end)
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
    groups = seen(settings)
    group = named(groups, options.name)
    without = tuple(options.without or ())
    planned = replace(group, excluded=without, address="", port=0)
    if options.dry_run:
        write_ranks(settings, planned)
        return
    if problems := clashes(groups, planned):
        raise UsageError(f"group {group.spec.name} cannot start: {problems[0]}", hint="`probingctl group status`")
    _check_nodes(settings, groups, planned, force=options.force)
    made = _order(settings, groups, group, action, without)
    hint(f"`probingctl group status {made.spec.name}` shows the ranks; `probingctl diagnose --job {made.spec.name}`")


def _order(
    settings: Settings, groups: GroupsSeen, group: Group, action: Action, without: tuple[str, ...] = ()
) -> Group:
    key = OwnerKey.of_user()
    if group.key != key.public:
        raise UsageError(
            f"group {group.spec.name} was signed by {group.spec.owner} with another key",
            hint="give the order where the group was created, or copy launch.key",
        )
    order = order_of(group, action, key, without)
    made = sent(settings, groups, group, pb.GroupRequest(name=group.spec.name, order=order.to_json()))
    write_objects(
        settings, [_row(groups, made)], f"group {made.spec.name}: {_said(made, action)}\n", [_row(groups, made)]
    )
    return made


def _said(group: Group, action: Action) -> str:
    ranks = plural(len(group.ranks()), "rank")
    if action in ("start", "restart"):
        without = f" without {', '.join(group.excluded)}" if group.excluded else ""
        return f"generation {group.generation} starts {ranks}{without}"
    return "its ranks are being ended" if group.occupied else f"it is {group.phase}"


def _check_nodes(settings: Settings, groups: GroupsSeen, group: Group, *, force: bool) -> None:
    """Checks the nodes of the ranks as ``preflight`` does. Raises UsageError if a check fails, unless ``force``."""
    from probing.client.preflight.asking import Wanted, gathered
    from probing.diagnosis.preflight.env_file import Plan
    from probing.diagnosis.preflight.result import FAIL
    from probing.diagnosis.preflight.run import results

    nodes = dict.fromkeys(rank.node for rank in group.ranks())
    if unknown := [node for node in nodes if node not in groups.addresses]:
        raise UsageError(f"node {escape(unknown[0], 80)} is not known here", hint="`probingctl nodes` lists the nodes")
    alone = replace(settings, nodes=(), all_nodes=False, where=())
    with opened(alone) as cluster:
        # The target is asked as it is: its address for other nodes may need a token.
        is_target = list(nodes) == [cluster.status()[0][1].node]
    addresses = tuple(groups.addresses[node] for node in nodes)
    with opened(alone if is_target else replace(alone, nodes=addresses, all_nodes=True)) as cluster:
        failures = [one for one in results(gathered(cluster, Wanted(), Plan())) if one.state == FAIL]
    for failure in failures:
        warn(f"{failure.check}: {failure.text}")
    if failures and not force:
        raise UsageError(
            f"group {group.spec.name} does not start: {plural(len(failures), 'check')} of its nodes failed",
            hint="mend what the warnings name, or give --force",
        )


def _row(groups: GroupsSeen, group: Group) -> Row:
    spec, ranks = group.spec, group.ranks()
    states = [row["rank_state"] for row in _rows_of(groups, group)]
    living = sum(state in _LIVING for state in states)
    return {
        "group": spec.name,
        "owner": spec.owner,
        "phase": group.phase,
        "since": utc(group.since_ns) if group.since_ns else None,
        "generation": group.generation,
        "ranks": f"{living}/{len(ranks)}",
        "master": f"{group.address or ranks[0].node}:{group.port or spec.master_port}",
        "why": groups.waits.get(spec.name) or group.reason or None,
        "version": spec.version,
        "restarts": group.restarts,
        "excluded": list(group.excluded),
        "command": list(spec.command),
    }


def _rows_of(groups: GroupsSeen, group: Group) -> list[Row]:
    name, generation = group.spec.name, group.generation
    return [row for row in groups.workers if row["group"] == name and (row["generation"] or 0) >= generation - 1]


def _rank_rows(groups: GroupsSeen, group: Group) -> list[Row]:
    """Returns a row for each rank of the present generation; a rank whose worker reports nothing says so."""
    by_worker = {row["worker"]: row for row in _rows_of(groups, group)}
    launchers = {row["worker"]: row["state"] for row in groups.workers}
    rows: list[Row] = []
    for rank in group.ranks():
        row = by_worker.get(rank.worker)
        launcher = launchers.get(rank.worker)
        rows.append(
            {
                "rank": rank.rank,
                "worker": rank.worker,
                "node": rank.node,
                "launcher": launcher or "none",
                "state": row["rank_state"] if row else "not started",
                "since": row["since"] if row else None,
                "pid": row["pid"] if row else None,
                "exit_code": row["exit_code"] if row else None,
                "reason": row["reason"] if row else (None if launcher else f"no launcher serves {rank.worker}"),
                "log": row["log"] if row else None,
            }
        )
    return rows
