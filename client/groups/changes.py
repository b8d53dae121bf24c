"""Changes a group's specification: builds it from the fields that the user gives, signs it with the user's key, and
sends it.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape
from probing.client.groups.records import GroupsSeen, named, sent, target_name
from probing.client.groups.rows import order_of_worker
from probing.client.user import user_name
from probing.groups.group import Group, created
from probing.groups.keys import OwnerKey
from probing.groups.spec import OnHang, Restart, Spec, checked, node_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = (
    "Fields",
    "chosen_workers",
    "first_spec",
    "next_spec",
    "put",
    "split",
    "variables",
    "with_fields",
    "workers_in",
)

_CHOICES = {"restart": get_args(Restart), "on_hang": get_args(OnHang)}
_NEW = "probingctl group create llama --workers gn6-0,gn39-0,gn40-0,gn7-0 --master gn6-0 -- python train.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The given fields of a specification. None: ``set`` keeps the present value, ``create`` takes the default.

    ``workers`` and ``each_node`` are arguments of ``chosen_workers``. ``env`` is added to the present variables.
    ``nnodes``: MIN:MAX nodes. Times are in seconds.
    """

    workers: Sequence[str] | None = None
    each_node: int | None = None
    master: str | None = None
    world_size: int | None = None
    master_port: int | None = None
    backend: str | None = None
    nnodes: str | None = None
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    command: Sequence[str] | None = None
    restart: str | None = None
    max_restarts: int | None = None
    on_hang: str | None = None
    grace_s: float | None = None
    fence_s: float | None = None
    save: Sequence[str] | None = None
    save_s: float | None = None


def first_spec(cluster: Cluster, groups: GroupsSeen, name: str, fields: Fields) -> Spec:
    """Returns the specification of a new group. Raises UsageError."""
    old = groups.groups.get(name)
    same = [other for other in groups.groups if other != name and other.casefold() == name.casefold()]
    if old is not None and old.phase != "deleted":
        raise UsageError(f"there is a group {old.spec.name} already", hint=f"probingctl group set {old.spec.name} ...")
    if same:
        raise UsageError(f"group {same[0]} differs from {escape(name, 64)} only in case", hint="choose another name")
    if fields.workers is None or fields.master is None or not fields.command:
        raise UsageError("a group needs --workers, --master and a command", hint=_NEW)
    first = Spec(
        name=name,
        version=1 if old is None else old.spec.version + 1,
        owner=user_name(),
        uid=os.getuid(),
        signed_on=target_name(cluster),
        workers=(),
        master=fields.master,
        command=(),
        id=secrets.token_hex(8) if old is None else old.spec.id,
    )
    return with_fields(first, fields, groups)


def next_spec(cluster: Cluster, groups: GroupsSeen, name: str) -> Spec:
    """Returns the group's specification with the next version number, ready to be signed for the target. Raises
    UsageError.
    """
    spec = named(groups, name).spec
    if spec.uid != os.getuid():
        raise UsageError(f"group {spec.name} belongs to {spec.owner}", hint="only its owner can change it")
    return replace(spec, version=spec.version + 1, signed_on=target_name(cluster))


def with_fields(spec: Spec, fields: Fields, groups: GroupsSeen) -> Spec:
    """Returns the specification with the fields that are given. Raises UsageError."""
    given: dict[str, Any] = {name: value for name, value in asdict(fields).items() if value is not None}
    words, each_node, nnodes = (given.pop(name, None) for name in ("workers", "each_node", "nnodes"))
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            option = f"--{name.replace('_', '-')} {escape(given[name], 40)}"
            raise UsageError(f"{option} is not known", hint=f"one of {', '.join(choices)}")
    if words is not None:
        given["workers"] = chosen_workers(groups, words, each_node)
    for name in ("command", "save"):
        if name in given:
            given[name] = tuple(given[name])
    if "env" in given:
        given["env"] = {**spec.env, **given["env"]}
    if nnodes is not None:
        given["min_nodes"] = _least(nnodes, given.get("workers", spec.workers))
    return checked(replace(spec, **given))


def put(cluster: Cluster, groups: GroupsSeen, spec: Spec, *, dry_run: bool) -> Group:
    """Signs the specification and sends it; with ``dry_run`` it is not sent. Returns the record as it was before a node
    stored it.
    """
    group = created(spec, OwnerKey.of_user())
    if not dry_run:
        # The specification is sent to a node of the old record, because a node that the change adds does not know the
        # group yet.
        known = groups.groups.get(spec.name, group)
        sent(cluster, groups, known, pb.GroupRequest(name=spec.name, create=group.to_json()))
    return group


def chosen_workers(groups: GroupsSeen, words: Sequence[str], each_node: int | None) -> tuple[str, ...]:
    """Returns the workers that ``words`` name: workers, patterns of workers, or nodes.

    A node stands for its first ``each_node`` workers. A pattern matches no workers of other users. Raises UsageError
    for a word that names no worker.
    """
    uid = os.getuid()
    serving = sorted({row["worker"] for row in groups.workers if row["uid"] == uid}, key=order_of_worker)
    nodes = {node_of(worker) for worker in serving}
    chosen: dict[str, None] = {}
    for word in words:
        if any(letter in word for letter in "*?["):
            names = [worker for worker in serving if fnmatchcase(worker, word)]
        elif word in nodes and each_node is not None:
            names = [worker for worker in serving if node_of(worker) == word][:each_node]
            if len(names) < each_node:
                raise UsageError(
                    f"node {word} serves {len(names)} workers, not {each_node}",
                    hint=f"probingctl worker --slots {each_node}, on that node",
                )
        else:
            names = [word]
        if not names:
            raise UsageError(
                f"no worker of yours matches {escape(word, 80)}", hint="`probingctl query 'FROM cluster.workers'`"
            )
        chosen.update(dict.fromkeys(names))
    return tuple(chosen)


def workers_in(text: str) -> list[str]:
    """Returns the words of a text such as ``A,B,C``."""
    return [word for part in text.split(",") if (word := part.strip())]


def split(text: str, what: str) -> list[str]:
    """Returns the words of a command, split as in a shell. ``what``: the name of the option in the UsageError."""
    try:
        return shlex.split(text)
    except ValueError as e:
        raise UsageError(f"{what} cannot be split into words: {e}", hint="quote it as in a shell") from None


def variables(texts: Sequence[str]) -> dict[str, str]:
    """Returns the variables of texts such as ``NAME=VALUE``. Raises UsageError."""
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--env {escape(text, 80)} has no value", hint="--env NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _least(text: str, workers: Sequence[str]) -> int:
    least, colon, most = text.partition(":")
    nodes = len(set(map(node_of, workers)))
    if not (least.isdecimal() and (not colon or most.isdecimal())):
        raise UsageError(f"--nnodes {escape(text, 40)} is not a range", hint="--nnodes MIN:MAX, such as 3:4")
    if colon and int(most) != nodes:
        raise UsageError(f"--nnodes {text}: the group has {nodes} nodes", hint="add workers of other nodes first")
    # A single number fixes the number of nodes, as in torchrun: the group is not restarted with fewer nodes.
    return int(least) if colon else 0
