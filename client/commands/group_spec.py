"""``group create``, ``set``, ``add`` and ``remove``: what a group runs, signed by the user who asks."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape
from probing.client.groups import GroupsSeen, chosen_workers, named, seen, sent
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.times import seconds
from probing.client.web.peers import user_name
from probing.groups.group import Group, created
from probing.groups.keys import OwnerKey
from probing.groups.spec import Spec, checked, node_of

__all__ = ("EXAMPLES", "Options", "WorkerOptions", "add", "change", "create", "remove", "write_ranks")

EXAMPLES = (
    "probingctl group create llama --workers gn6-0,gn39-0,gn40-0,gn7-0 --master gn6-0 -- python train.py",
    "probingctl group create llama --workers 'gn*' --master gn6 --backend gloo --dry-run -- python train.py",
    "probingctl group set llama --master gn7 --env LR=0.1",
    "probingctl group add llama gn8-0",
)
_RANKS = (
    Field("WORKER", "worker", flex=True),
    Field("RANK", "rank", right=True),
    Field("LOCAL_RANK", "local_rank", right=True),
    Field("NODE_RANK", "node_rank", right=True),
    Field("WORLD_SIZE", "world_size", right=True),
    Field("MASTER", "master"),
    Field("BACKEND", "backend"),
)
_TEXTS = ("master", "backend", "cwd", "restart", "on_hang")
_NUMBERS = ("world_size", "master_port", "max_restarts")


@dataclass(frozen=True, slots=True)
class Options:
    """The fields of a specification; None: as it is, or the default."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="What each worker runs.")] = (
        None
    )
    workers: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Workers NODE-N, patterns, or nodes with --nproc-per-node.")
    ] = None
    master: Annotated[str | None, typer.Option(metavar="NAME", help="The worker or node of rank 0.")] = None
    world_size: Annotated[int | None, typer.Option(metavar="N", help="Ranks; default: one for each worker.")] = None
    master_port: Annotated[int | None, typer.Option(metavar="PORT", help="First port to try; default: 29500.")] = None
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="nccl (default) or gloo.")] = None
    nproc_per_node: Annotated[int | None, typer.Option(metavar="N", help="Workers that a node stands for.")] = None
    nnodes: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Start again without failed nodes while MIN are left.")
    ] = None
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable for all ranks; repeat.")] = None
    cwd: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of the ranks; default: your home.")] = None
    restart: Annotated[str | None, typer.Option(metavar="WHEN", help="never (default), on_failure or always.")] = None
    max_restarts: Annotated[int | None, typer.Option(metavar="N", help="By policy, within an hour; default: 3.")] = None
    on_hang: Annotated[
        str | None, typer.Option(metavar="WHAT", help="report (default), restart or restart_without_node.")
    ] = None
    grace: Annotated[str | None, typer.Option(metavar="TIME", help="Between SIGTERM and SIGKILL; default: 10s.")] = None
    fence: Annotated[
        str | None, typer.Option(metavar="TIME", help="After this time alone, a node ends its ranks; default: 60s.")
    ] = None
    save: Annotated[str | None, typer.Option(metavar="COMMAND", help="Run before a restart by policy, or SIGUSR1.")] = (
        None
    )
    save_time: Annotated[str | None, typer.Option(metavar="TIME", help="Limit of --save; default: 60s.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and change nothing.")] = False


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group.")]
    workers: Annotated[list[str], typer.Argument(metavar="WORKER...", help="Workers NODE-N, or patterns.")]
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the ranks, and change nothing.")] = False


def create(settings: Settings, options: Options) -> None:
    groups = seen(settings)
    old = groups.groups.get(options.name)
    same = [name for name in groups.groups if name != options.name and name.casefold() == options.name.casefold()]
    if old is not None and old.phase != "deleted":
        raise UsageError(f"there is a group {old.spec.name} already", hint=f"probingctl group set {old.spec.name} ...")
    if same:
        raise UsageError(f"group {same[0]} differs from {escape(options.name, 64)} only in case", hint="another name")
    if options.workers is None or options.master is None or not options.command:
        raise UsageError("a group needs --workers, --master and a command", hint=EXAMPLES[0])
    first = Spec(
        name=options.name,
        version=1 if old is None else old.spec.version + 1,
        owner=user_name(),
        uid=os.getuid(),
        signed_on=_signing_node(settings),
        workers=(),
        master=options.master,
        command=(),
        id=secrets.token_hex(8) if old is None else old.spec.id,
    )
    _put(settings, groups, _with(first, options, groups), dry_run=options.dry_run)


def change(settings: Settings, options: Options) -> None:
    groups = seen(settings)
    _put(settings, groups, _with(_next(settings, groups, options.name), options, groups), dry_run=options.dry_run)


def add(settings: Settings, options: WorkerOptions) -> None:
    groups = seen(settings)
    spec = _next(settings, groups, options.name)
    more = chosen_workers(groups, options.workers, None)
    workers = (*spec.workers, *(worker for worker in more if worker not in spec.workers))
    _put(settings, groups, checked(replace(spec, workers=workers)), dry_run=options.dry_run)


def remove(settings: Settings, options: WorkerOptions) -> None:
    groups = seen(settings)
    spec = _next(settings, groups, options.name)
    if absent := [word for word in options.workers if word not in spec.workers]:
        raise UsageError(f"group {spec.name} has no worker {escape(absent[0], 80)}", hint="`probingctl group status`")
    workers = tuple(worker for worker in spec.workers if worker not in options.workers)
    _put(settings, groups, checked(replace(spec, workers=workers)), dry_run=options.dry_run)


def write_ranks(settings: Settings, group: Group) -> None:
    rows = [{**asdict(rank), "master": f"{rank.master_addr}:{rank.master_port}"} for rank in group.ranks()]
    write_table(settings, _RANKS, rows)


def _next(settings: Settings, groups: GroupsSeen, name: str) -> Spec:
    """Returns the specification with the number of its next version, to be signed here."""
    spec = named(groups, name).spec
    if spec.uid != os.getuid():
        raise UsageError(f"group {spec.name} belongs to {spec.owner}", hint="only its owner can change it")
    return replace(spec, version=spec.version + 1, signed_on=_signing_node(settings))


def _signing_node(settings: Settings) -> str:
    """Returns the name of the node on which the user signs: that of the daemon of this machine."""
    with opened(replace(settings, nodes=(), all_nodes=False, where=())) as cluster:
        return cluster.status()[0][1].node


def _put(settings: Settings, groups: GroupsSeen, spec: Spec, *, dry_run: bool) -> None:
    group = created(spec, OwnerKey.of_user())
    if not dry_run:
        sent(settings, groups, group, pb.GroupRequest(name=spec.name, create=group.to_json()))
    write_ranks(settings, group)


def _with(spec: Spec, options: Options, groups: GroupsSeen) -> Spec:
    """Returns the specification with the options that are given. Raises UsageError."""
    given: dict[str, Any] = {}
    for name in (*_TEXTS, *_NUMBERS):
        if (value := getattr(options, name)) is not None:
            given[name] = value
    for name, choices in (
        ("restart", ("never", "on_failure", "always")),
        ("on_hang", ("report", "restart", "restart_without_node")),
    ):
        if given.get(name, choices[0]) not in choices:
            raise UsageError(
                f"--{name.replace('_', '-')} {escape(given[name], 40)}", hint=f"one of {', '.join(choices)}"
            )
    if options.workers is not None:
        given["workers"] = chosen_workers(groups, _words(options.workers), options.nproc_per_node)
    if options.command:
        given["command"] = tuple(options.command)
    if options.env is not None:
        given["env"] = {**spec.env, **_variables(options.env)}
    for name, text in (("grace_s", options.grace), ("fence_s", options.fence), ("save_s", options.save_time)):
        if text is not None:
            given[name] = seconds(text)
    if options.save is not None:
        given["save"] = tuple(_split(options.save))
    if options.nnodes is not None:
        given["min_nodes"] = _least(options.nnodes, given.get("workers", spec.workers))
    return checked(replace(spec, **given))


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as e:
        raise UsageError(f"--save cannot be split into words: {e}", hint="quote it as in a shell") from None


def _variables(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--env {escape(text, 80)} has no value", hint="--env NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _least(text: str, workers: Sequence[str]) -> int:
    least, colon, most = text.partition(":")
    nodes = len(set(map(node_of, workers)))
    if not (least.isdecimal() and (not colon or most.isdecimal())):
        raise UsageError(f"--nnodes {escape(text, 40)} is no range", hint="--nnodes MIN:MAX, such as 3:4")
    if colon and int(most) != nodes:
        raise UsageError(f"--nnodes {text}: the group has {nodes} nodes", hint="add workers of other nodes first")
    # As for torchrun, a single number allows no other.
    return int(least) if colon else 0
