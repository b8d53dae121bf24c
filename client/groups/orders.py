"""Orders of a group's owner: start, restart, stop and delete, signed with the key of the user who gives the order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from probing.api.errors import UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.text import listed, plural
from probing.client.groups.records import GroupsSeen, nodes_at, sent
from probing.groups.group import Action, Group, order_of
from probing.groups.keys import OwnerKey

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.diagnosis.preflight.result import Result

__all__ = ("Begun", "begin", "clashes", "end", "outcome", "planned", "refusal")


@dataclass(frozen=True, slots=True)
class Begun:
    """The result of a start. ``group``: the record; None if failed checks prevented the start. ``failures``: the failed
    checks of the nodes.
    """

    group: Group | None
    failures: list[Result]


def planned(group: Group, without: Collection[str]) -> Group:
    """Returns the record with the ranks that a start without the nodes ``without`` would have."""
    return replace(group, excluded=tuple(without), address="", port=0)


def begin(
    cluster: Cluster,
    groups: GroupsSeen,
    group: Group,
    action: Action,
    without: Collection[str] = (),
    *,
    force: bool = False,
) -> Begun:
    """Starts or restarts all ranks after checks of their nodes; with ``force`` even if a check fails.

    Raises UsageError if a worker or the port is in use, or the group was signed with another key.
    """
    plan = planned(group, without)
    if problems := clashes(groups, plan):
        raise UsageError(f"group {group.spec.name} cannot start: {problems[0]}", hint="`probingctl group status`")
    failures = _failed_checks(cluster, groups, plan)
    if failures and not force:
        return Begun(None, failures)
    return Begun(_ordered(cluster, groups, group, action, without), failures)


def end(cluster: Cluster, groups: GroupsSeen, group: Group, action: Action) -> Group:
    """Stops or deletes a group, and returns its record. Raises UsageError."""
    name = group.spec.name
    if action == "stop" and group.phase == "stopped":
        raise UsageError(f"group {name} is stopped", hint=f"probingctl group status {name}")
    return _ordered(cluster, groups, group, action)


def refusal(group: Group, failures: Collection[Result]) -> UsageError:
    """Returns the error for a start that failed checks prevented."""
    return UsageError(
        f"group {group.spec.name} does not start: {plural(len(failures), 'check')} of its nodes failed",
        hint="mend what the warnings name, or give --force",
    )


def outcome(group: Group, action: Action) -> str:
    """Returns a text that says what an order has begun."""
    if action in ("start", "restart"):
        without = f" without {', '.join(group.excluded)}" if group.excluded else ""
        return f"generation {group.generation} starts {plural(len(group.ranks()), 'rank')}{without}"
    return "its ranks are being ended" if group.occupied else f"it is {group.phase}"


def clashes(groups: GroupsSeen, group: Group) -> list[str]:
    """Returns the reasons why ``group`` cannot start now: running groups use one of its workers or the master's
    port."""
    mine = {rank.worker for rank in group.ranks()}
    master = group.ranks()[0]
    problems = []
    for other in groups.groups.values():
        if other.spec.name == group.spec.name or other.phase not in ("ending", "running"):
            continue
        # A worker belongs to a user. A group of another user may name the worker, but cannot use it.
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


def _failed_checks(cluster: Cluster, groups: GroupsSeen, group: Group) -> list[Result]:
    """Returns the checks of ``preflight`` that fail on the nodes of the ranks."""
    from probing.client.preflight.asking import Wanted, gathered
    from probing.diagnosis.preflight.env_file import Plan
    from probing.diagnosis.preflight.result import FAIL
    from probing.diagnosis.preflight.run import results

    nodes = {rank.node for rank in group.ranks()}
    # Nodes that the target reports as gone are not asked, because waiting for their answers would delay the order.
    gone = {failed.node: failed.reason for failed in cluster.absent if failed.node in nodes}
    case = gathered(nodes_at(cluster, groups, sorted(nodes - gone.keys()) or nodes), Wanted(), Plan())
    return [result for result in results(replace(case, silent={**case.silent, **gone})) if result.state == FAIL]


def _ordered(
    cluster: Cluster, groups: GroupsSeen, group: Group, action: Action, without: Collection[str] = ()
) -> Group:
    key = OwnerKey.of_user()
    if group.key != key.public:
        raise UsageError(
            f"group {group.spec.name} was signed by {group.spec.owner} with another key",
            hint="give the order where the group was created, or copy launch.key",
        )
    order = order_of(group, action, key, without)
    return sent(cluster, groups, group, pb.GroupRequest(name=group.spec.name, order=order.to_json()))
