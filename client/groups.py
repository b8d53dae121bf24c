"""Groups of workers as the client sees them: the newest record of each, the node that changes it, and its workers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from probing.api.errors import NotFound, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape, listed
from probing.client.session import opened
from probing.client.settings import Settings
from probing.groups.group import Group
from probing.groups.spec import node_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.render.rows import Row

__all__ = ("GroupsSeen", "chosen_workers", "clashes", "named", "node_named", "seen", "sent")

_MEMBERS = "SELECT DISTINCT member, address FROM cluster.members WHERE member <> '' AND address <> ''"
_WORKERS = 'SELECT * FROM cluster.workers ORDER BY "group", rank, worker'
_WAITS = 'SELECT "group", waits_for FROM cluster.groups WHERE waits_for IS NOT NULL'


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """``groups``: the newest record of each group by name. ``workers``: rows of cluster.workers of all nodes that
    answered. ``addresses`` of the nodes by name. ``waits``: why a group's start waits, by name.
    """

    groups: dict[str, Group]
    workers: list[Row]
    addresses: dict[str, str]
    waits: dict[str, str]


def seen(settings: Settings) -> GroupsSeen:
    """Returns the groups of all nodes, or of the nodes that ``settings`` choose."""
    with opened(_all(settings)) as cluster:
        return _seen(cluster)


def _seen(cluster: Cluster) -> GroupsSeen:
    from probing.client.render.rows import rows_of

    newest: dict[str, Group] = {}
    for group in map(Group.from_json, cluster.groups(pb.GroupRequest())):
        name = group.spec.name
        if name not in newest or _age(group) > _age(newest[name]):
            newest[name] = group
    answers = cluster.query_all({"members": _MEMBERS, "workers": _WORKERS, "waits": _WAITS})
    members, workers, waits = (rows_of(answers[name]) for name in ("members", "workers", "waits"))
    return GroupsSeen(
        newest,
        list(workers),
        {row["member"]: row["address"] for row in members},
        {row["group"]: row["waits_for"] for row in waits},
    )


def _age(group: Group) -> tuple[int, int, int]:
    return group.generation, group.spec.version, group.since_ns


def named(groups: GroupsSeen, name: str) -> Group:
    """Returns the group of this name. Raises NotFound."""
    group = groups.groups.get(name)
    if group is None or group.phase == "deleted":
        names = sorted(name for name, one in groups.groups.items() if one.phase != "deleted")
        hint = f"groups: {listed(names[:8])}" if names else "probingctl group create NAME ..."
        raise NotFound(f"there is no group {escape(name, 64)}", hint=hint)
    return group


def sent(settings: Settings, groups: GroupsSeen, group: Group, request: pb.GroupRequest) -> Group:
    """Returns the record after the change in ``request``, which a node of the group makes.

    The target makes it if it is one of them, else the node of the master. Raises ProbingError.
    """
    with _node_of(settings, groups, group) as cluster:
        return Group.from_json(cluster.groups(request)[0])


@contextmanager
def node_named(settings: Settings, groups: GroupsSeen, node: str) -> Iterator[Cluster]:
    """Returns a context with the one node of this name. Raises NotFound."""
    alone = replace(settings, nodes=(), all_nodes=False, where=())
    with opened(alone) as cluster:
        if cluster.status()[0][1].node == node:
            yield cluster
            return
    if not (address := groups.addresses.get(node)):
        raise NotFound(f"node {escape(node, 64)} is not known here", hint="`probingctl nodes` lists the nodes")
    with opened(replace(alone, target=address)) as cluster:
        yield cluster


@contextmanager
def _node_of(settings: Settings, groups: GroupsSeen, group: Group) -> Iterator[Cluster]:
    alone = replace(settings, nodes=(), all_nodes=False, where=())
    with opened(alone) as cluster:
        target = cluster.status()[0][1].node if not settings.nodes else ""
        if target in group.nodes or not (address := groups.addresses.get(group.voters[0])):
            yield cluster
            return
    with opened(replace(alone, target=address)) as cluster:
        yield cluster


def chosen_workers(groups: GroupsSeen, words: Sequence[str], each_node: int | None) -> tuple[str, ...]:
    """Returns the workers that ``words`` name: workers, patterns of workers, or nodes.

    A node stands for its first ``each_node`` workers. Workers of other users are left out of patterns. Raises
    UsageError for a word that names none.
    """
    uid = os.getuid()
    serving = sorted({row["worker"] for row in groups.workers if row["uid"] == uid}, key=_order)
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


def _order(worker: str) -> tuple[str, int]:
    node, _, number = worker.rpartition("-")
    return node, int(number) if number.isdecimal() else 0


def clashes(groups: GroupsSeen, group: Group) -> list[str]:
    """Returns why ``group`` cannot start beside the groups that run: a worker or the master's port is in use."""
    mine = {rank.worker for rank in group.ranks()}
    master = group.ranks()[0]
    problems = []
    for other in groups.groups.values():
        if other.spec.name == group.spec.name or other.phase not in ("ending", "running"):
            continue
        # A worker belongs to a user: a group of another user may name it, and gets nothing.
        same_user = other.spec.uid == group.spec.uid
        if same_user and (shared := sorted(mine & {rank.worker for rank in other.ranks()})):
            problems.append(f"{_workers_text(shared)} in group {other.spec.name}, which is {other.phase}")
        elif other.ranks()[0].node == master.node and other.port == master.master_port:
            problems.append(
                f"group {other.spec.name} uses port {master.master_port} of node {master.node}: give --master-port"
            )
    return problems


def _workers_text(workers: Collection[str]) -> str:
    names = listed(sorted(workers)[:4])
    return f"worker {names} is" if len(workers) == 1 else f"workers {names} are"


def _all(settings: Settings) -> Settings:
    return settings if settings.nodes or settings.where else replace(settings, all_nodes=True)
