"""Decides whether a launcher accepts a record, and whether it may start the record's generation.

The functions are pure: all facts are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from probing.api.text import escape, listed, plural
from probing.groups.group import Group, Phase
from probing.groups.spec import Spec
from probing.launcher.allowed import Rules, command_problem
from probing.launcher.state import History

__all__ = ("Facts", "Verdict", "ended_below", "fence_times", "recent_restarts", "record_problem", "start_verdict")

_SECOND_NS = 1_000_000_000
# An hour, minus the time that a record may need to reach this launcher: the cluster counts the hour from the time when
# the record was made.
_HOUR_NS = 3_540_000_000_000
_ORDER: dict[Phase, int] = {"ending": 0, "running": 1, "finished": 2}
_LAST = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What the launcher knows at one moment. ``boot_ns``: ns since boot. ``ranks``: the number of this
    launcher's ranks in the generation. ``older``: pids of processes of older generations. ``problem``: why nothing can
    be started, or empty. ``unknown``: why the processes are not known, or empty.
    """

    node: str
    boot_id: str
    boot_ns: int
    ranks: int
    older: tuple[int, ...] = ()
    problem: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a generation may be started, and why not."""

    state: Literal["start", "idle", "waiting", "refused"]
    reason: str = ""


def record_problem(group: Group, history: History | None, rules: Rules) -> str:
    """Returns why a record is refused; empty if it is accepted. ``history``: what the launcher remembers of the
    group of this name; None if it remembers nothing.
    """
    spec = group.spec
    name = spec.name
    if group.key not in rules.keys:
        return f"group {name} is signed by a key that {rules.user} does not trust"
    if spec.uid != rules.uid:
        owner = f"{escape(spec.owner, 64)} (uid {spec.uid})"
        return f"group {name} belongs to {owner}, and this launcher runs as {rules.user} (uid {rules.uid})"
    if not group.is_signed():
        return f"the record of group {name} is not signed by its owner"
    if history is None:
        return ""
    if (group.key, spec.id) != (history.key, history.id):
        return f"another group had the name {name}: give the group another name"
    order = group.order.generation if group.order else 0
    for what, number, seen in (
        ("generation", group.generation, history.generation),
        ("version", spec.version, history.version),
        ("order", order, history.order),
    ):
        if number < seen:
            return f"an older record of group {name}: {what} {number}, and {what} {seen} was seen"
    same = (group.generation, spec.version) == (history.generation, history.version)
    if same and _ORDER.get(group.phase, _LAST) < _ORDER.get(history.phase, _LAST):
        return (
            f"an older record of group {name}: generation {group.generation} is {group.phase} in this record, "
            f"and was {history.phase} in a newer record"
        )
    return ""


def start_verdict(group: Group, history: History, rules: Rules, facts: Facts) -> Verdict:
    """Returns whether the generation in ``group``, which must be an accepted record, may be started here now."""
    if group.phase == "ending":
        return Verdict("waiting", "processes of the older generation end first, on all nodes")
    if group.phase != "running":
        return Verdict("idle", group.reason)
    if not facts.ranks:
        return Verdict("idle", f"generation {group.generation} has no rank for this worker")
    if problem := _order_problem(group, history) or command_problem(group.spec, facts.node, rules.allow):
        return Verdict("refused", problem)
    if problem := _restart_problem(group, history, facts) or facts.problem:
        return Verdict("refused", problem)
    if facts.unknown:
        return Verdict("waiting", facts.unknown)
    if facts.older:
        return Verdict("waiting", _older_text(facts.older))
    if group.spec.fenced and not _lease_holds(group.spec, history, facts):
        return Verdict("waiting", "there is no word from a majority of the group's nodes yet")
    return Verdict("start")


def fence_times(spec: Spec, end_ns: int) -> tuple[int, int]:
    """Returns when SIGTERM and SIGKILL are due, so that all processes are dead at ``end_ns``, the end of their lease;
    all in ns since boot.
    """
    fence_ns = round(spec.fence_s * _SECOND_NS)
    kill_ns = end_ns - min(fence_ns // 20, _SECOND_NS)
    return kill_ns - min(round(spec.grace_s * _SECOND_NS), fence_ns // 2), kill_ns


def ended_below(generation: int, phase: Phase) -> int:
    """Returns the generation below which all processes must end under a record with ``generation`` and ``phase``."""
    return generation + (phase not in ("ending", "running", "finished"))


def recent_restarts(history: History, boot_id: str, boot_ns: int) -> int:
    """Returns the number of starts within the last hour that the owner did not order.

    A start in an earlier boot counts as a start at the beginning of this boot: its age is unknown, because the clock
    may have been set since then.
    """
    stamps = [boot_ns - (at_ns if boot == boot_id else 0) for boot, at_ns in history.restarts]
    return sum(age_ns < _HOUR_NS for age_ns in stamps)


def _order_problem(group: Group, history: History) -> str:
    order, version = group.order, group.spec.version
    if order is None:
        return "its owner has not ordered a start"
    if order.action not in ("start", "restart"):
        return f"its owner's last order is {order.action}"
    if order.version != version:
        return f"its owner's last order is for version {order.version} of the specification, not {version}"
    if not history.order <= order.generation <= group.generation:
        return f"its owner's last order is for generation {order.generation}, and an order for {history.order} was seen"
    return ""


def _restart_problem(group: Group, history: History, facts: Facts) -> str:
    if group.order is None or group.generation == group.order.generation:
        return ""
    number = recent_restarts(history, facts.boot_id, facts.boot_ns)
    if number < group.spec.max_restarts:
        return ""
    return f"{plural(number, 'restart')} within an hour, and the specification allows {group.spec.max_restarts}"


def _lease_holds(spec: Spec, history: History, facts: Facts) -> bool:
    lease = history.lease
    if lease is None or lease[0] != facts.boot_id or lease[2] != history.generation:
        return False
    # Ranks that start after SIGTERM is due would have to be ended at once, but the launcher ends the ranks of a lease
    # only once.
    return fence_times(spec, lease[1])[0] > facts.boot_ns


def _older_text(pids: tuple[int, ...]) -> str:
    if len(pids) == 1:
        return f"process {pids[0]} of an older generation still runs"
    return f"processes {listed(map(str, pids))} of an older generation still run"
