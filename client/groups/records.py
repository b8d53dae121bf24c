"""Groups of workers as the client sees them: the newest record of each group, the nodes to ask, and the logs of
ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probing.api.errors import FormatError, NotFound, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import escape, listed
from probing.client.render.rows import rows_of
from probing.client.session import warn
from probing.groups.group import Group

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.render.rows import Row

__all__ = (
    "GroupsSeen",
    "living_groups",
    "named",
    "node_named",
    "node_of_rank",
    "nodes_at",
    "seen",
    "sent",
    "target_name",
)

_MEMBERS = "SELECT DISTINCT member, address FROM cluster.members WHERE member <> '' AND address <> ''"
_WORKERS = "SELECT * FROM cluster.workers ORDER BY group_name, rank, worker"
_WAITS = "SELECT group_name, waits_for FROM cluster.groups WHERE waits_for IS NOT NULL"


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """``groups``: the newest record of each group, by name. ``workers``: the rows of cluster.workers of all nodes that
    answered. ``addresses``: the address of each node, by name. ``waits``: why the start of a group waits, by name.
    """

    groups: dict[str, Group]
    workers: list[Row]
    addresses: dict[str, str]
    waits: dict[str, str]


def seen(cluster: Cluster) -> GroupsSeen:
    """Returns the groups that the nodes of ``cluster`` know."""
    by_name: dict[str, list[Group]] = defaultdict(list)
    for record in cluster.groups(pb.GroupRequest()):
        try:
            group = Group.from_json(record)
        except FormatError as e:
            warn(f"a record of a group is left out: {e.message}")
        else:
            by_name[group.spec.name].append(group)
    answers = cluster.query_all({"members": _MEMBERS, "workers": _WORKERS, "waits": _WAITS})
    members, workers, waits = (rows_of(answers[name]) for name in ("members", "workers", "waits"))
    return GroupsSeen(
        {name: _newest(records) for name, records in by_name.items()},
        list(workers),
        {row["member"]: row["address"] for row in members},
        {row["group_name"]: row["waits_for"] for row in waits},
    )


def _newest(records: Sequence[Group]) -> Group:
    """Returns the newest record of a group. If different groups have the same name, chooses the group that most nodes
    know.
    """
    nodes = Counter((group.key, group.spec.id) for group in records)
    return max(records, key=lambda group: (nodes[group.key, group.spec.id], _age(group)))


def _age(group: Group) -> tuple[int, int, int]:
    return group.generation, group.spec.version, group.since_ns


def living_groups(groups: GroupsSeen) -> list[Group]:
    """Returns the groups that are not deleted, in the order of their names."""
    return [group for _, group in sorted(groups.groups.items()) if group.phase != "deleted"]


def named(groups: GroupsSeen, name: str) -> Group:
    """Returns the group of this name. Raises NotFound."""
    group = groups.groups.get(name)
    if group is None or group.phase == "deleted":
        names = [group.spec.name for group in living_groups(groups)]
        hint = f"groups: {listed(names[:8])}" if names else "probingctl group create NAME ..."
        raise NotFound(f"there is no group {escape(name, 64)}", hint=hint)
    return group


def sent(cluster: Cluster, groups: GroupsSeen, group: Group, request: pb.GroupRequest) -> Group:
    """Has a node of the group make the change in ``request``, and returns the record after the change.

    That node is the target if the target belongs to the group; else the node of the master, or another voter if the
    node of the master does not answer. Raises ProbingError.
    """
    node = _node_of(cluster, groups, group)
    return Group.from_json(node.groups(request)[0])


def node_of_rank(cluster: Cluster, groups: GroupsSeen, group: Group, rank: int) -> Cluster:
    """Returns a cluster that asks only the node of a rank. Raises UsageError for an unknown rank, and NotFound for an
    unknown node.
    """
    node = next((each.node for each in group.ranks() if each.rank == rank), None)
    if node is None:
        raise UsageError(f"group {group.spec.name} has no rank {rank}", hint=f"0 to {len(group.ranks()) - 1}")
    return _node(cluster, groups, node)


def node_named(cluster: Cluster, node: str) -> Cluster:
    """Returns a cluster that asks only the node of this name, at the address that the target knows. If the user gave
    the addresses of nodes, returns ``cluster``.

    Outcomes are added to those of ``cluster``. An unknown node raises NotFound at the first question.
    """
    if cluster.named:
        return cluster
    if target_name(cluster) == node:
        return _target(cluster)
    # The target says which of its peers may be shown a token.
    return _sharing(cluster.afresh(all_nodes=True, node=node), cluster)


def nodes_at(cluster: Cluster, groups: GroupsSeen, nodes: Iterable[str]) -> Cluster:
    """Returns a cluster that asks only the nodes of these names. Outcomes are added to those of ``cluster``. Raises
    NotFound.
    """
    names = list(dict.fromkeys(nodes))
    # The target is asked at the address that the user gave; its address for other nodes may need a token.
    if not cluster.named and names == [target_name(cluster)]:
        return _target(cluster)
    return _sharing(cluster.at([_address(groups, name) for name in names]), cluster)


def target_name(cluster: Cluster) -> str:
    """Returns the name of the target, the node on which the user signs."""
    return _target(cluster).status()[0][1].node


def _node_of(cluster: Cluster, groups: GroupsSeen, group: Group) -> Cluster:
    heard = {row["node"] for row in groups.workers}
    first = next((node for node in group.voters if node in heard), group.voters[0])
    if first not in groups.addresses or (not cluster.named and target_name(cluster) in group.nodes):
        return _target(cluster)
    return _node(cluster, groups, first)


def _node(cluster: Cluster, groups: GroupsSeen, node: str) -> Cluster:
    if cluster.named:
        return nodes_at(cluster, groups, [node])
    _address(groups, node)
    return node_named(cluster, node)


def _address(groups: GroupsSeen, node: str) -> str:
    if not (address := groups.addresses.get(node)):
        raise NotFound(f"node {escape(node, 80)} is not known here", hint="`probingctl nodes` lists the nodes")
    return address


def _target(cluster: Cluster) -> Cluster:
    return _sharing(cluster.afresh(all_nodes=False), cluster)


def _sharing(other: Cluster, cluster: Cluster) -> Cluster:
    other.outcomes = cluster.outcomes
    return other
