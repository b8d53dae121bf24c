"""Decides what happens to a group next, from its record and the reports of its launchers. Does no input or output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from probing.api.text import listed, plural, ranks_of
from probing.daemon.backoff import doubled
from probing.groups.group import Group
from probing.groups.report import WorkerRow
from probing.groups.spec import node_of

__all__ = ("Step", "Watched", "absences", "next_step")

# The margin for clocks and scheduling, s: a start waits this long after the fence of a node that does not answer.
_MARGIN_S = 5.0
_MAX_PAUSE_S = 60.0
# How long a start waits for the launchers of all nodes, s. A group with min_nodes then starts without the missing
# nodes.
_PATIENCE_S = 30.0
# A node of a running group counts as gone after this time without an answer, s.
_GONE_S = 15.0
_SIGNALS = {9: "SIGKILL", 15: "SIGTERM", 6: "SIGABRT", 11: "SIGSEGV", 7: "SIGBUS", 2: "SIGINT"}


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the record. ``kind``: run, restart, finished or failed. ``without``: nodes to leave out."""

    kind: Literal["run", "restart", "finished", "failed"]
    cause: str = ""
    reason: str = ""
    without: tuple[str, ...] = ()


@dataclass(slots=True)
class Watched:
    """What this node remembers of the present generation. Times are on time.monotonic(), s.

    ``since``: when this node learned of the phase. ``rows``: the last reports of each node; None for a node that does
    not answer. ``silent``: since when such a node has not answered, and when it was last asked. ``every``: the seconds
    between two requests for reports. ``waits_for``: why the start waits. ``failed``: when a failure was first seen.
    """

    generation: int = -1
    phase: str = ""
    since: float = 0.0
    rows: dict[str, list[WorkerRow] | None] = field(default_factory=dict)
    silent: dict[str, tuple[float, float]] = field(default_factory=dict)
    every: float = 1.0
    waits_for: str = ""
    failed: float | None = None

    def note(self, group: Group, now: float) -> None:
        """Resets the fields that belong to one generation and phase, if the record has another generation or phase."""
        if (self.generation, self.phase) != (group.generation, group.phase):
            self.generation, self.phase, self.since = group.generation, group.phase, now
            self.waits_for, self.failed = "", None

    def heard(self, node: str, rows: list[WorkerRow] | None, now: float) -> None:
        self.rows[node] = rows
        if rows is not None:
            self.silent.pop(node, None)
            return
        since, asked = self.silent.get(node, (now, now))
        # If this node has not asked for a long time, the silence begins anew: another node may have asked and got
        # answers meanwhile.
        self.silent[node] = (since if now - asked < max(_GONE_S, 3 * self.every) else now), now


def next_step(group: Group, watched: Watched, now: float, now_ns: int) -> Step | None:
    """Returns the next change of the record; None if nothing is due. Writes ``watched.waits_for`` and ``failed``."""
    if group.phase == "ending":
        return _start(group, watched, now, now_ns)
    if group.phase == "running":
        return _running(group, watched, now, now_ns)
    return None


def _start(group: Group, watched: Watched, now: float, now_ns: int) -> Step | None:
    spec = group.spec
    # A worker may have a refusal, whose ``seen`` is 0, and a newer row. The sort makes the row with the highest
    # ``seen`` the one that ``rows`` keeps.
    every = sorted((row for each in watched.rows.values() for row in each or ()), key=lambda row: row.seen)
    rows = {row.worker: row for row in every}
    ranks = {rank.worker: rank.rank for rank in group.ranks()}
    refused = [row for row in every if row.state == "refused" and row.generation == group.generation]
    if refused := [row for row in refused if row.worker in ranks]:
        return Step("failed", "failure", _failure_text(refused, ranks))
    fence_s = group.fenced_s if spec.fenced else None
    fenced = fence_s is not None and now - watched.since > fence_s + _MARGIN_S
    # A dict is used as an ordered set: each node once, in the order of the workers.
    silent: dict[str, None] = {}
    unserved, busy = [], []
    for worker in group.occupied:
        row, node = rows.get(worker), node_of(worker)
        if watched.rows.get(node) is None:
            if not fenced:
                silent[node] = None
        elif row is None:
            unserved.append(worker)
        elif row.seen < group.generation or not row.clear:
            busy.append(worker)
    absent = [worker for worker in ranks if _is_absent(worker, group, rows)]
    if reasons := [
        f"{what} {listed(names[:8])}"
        for what, names in (
            ("an answer of node", list(silent)),
            ("a launcher that serves", unserved),
            ("the end of older processes of", busy),
        )
        if names
    ]:
        watched.waits_for = f"waits for {', and for '.join(reasons)}"
        return None
    if not absent:
        watched.waits_for = ""
        return Step("run")
    watched.waits_for = f"waits for a launcher that serves {listed(absent[:8])}"
    without = {node_of(worker) for worker in absent}
    patient = now - watched.since <= _PATIENCE_S or not group.may_restart("failure", now_ns)
    if spec.min_nodes and not patient and _nodes_left(group, without) >= spec.min_nodes:
        return Step("restart", "failure", f"no launcher serves {listed(absent[:8])}", tuple(sorted(without)))
    return None


def _is_absent(worker: str, group: Group, rows: Mapping[str, WorkerRow]) -> bool:
    row = rows.get(worker)
    return row is None or row.seen < group.generation


def _running(group: Group, watched: Watched, now: float, now_ns: int) -> Step | None:
    spec = group.spec
    ranks = {rank.worker: rank.rank for rank in group.ranks()}
    by_worker = {
        row.worker: row
        for each in watched.rows.values()
        for row in each or ()
        if row.generation == group.generation and row.worker in ranks
    }
    rows = by_worker.values()
    failed = sorted((row for row in rows if row.failed), key=lambda row: (row.since_ns, ranks[row.worker]))
    ended = [row for row in rows if row.state == "ended"]
    gone = _gone(group, watched, now)
    if gone and spec.min_nodes and _nodes_left(group, gone) >= spec.min_nodes:
        names = listed(sorted(gone)[:8])
        return _again(group, watched, "failure", f"no answer from {names}", now, now_ns, tuple(sorted(gone)))
    if len(ended) == len(ranks) and not failed:
        if spec.restart == "always":
            return _again(group, watched, "always", "all ranks have ended", now, now_ns)
        return Step("finished", reason=f"{plural(len(ranks), 'rank')} ended with status 0")
    if not failed:
        watched.failed = None
        return None
    reason = _failure_text(failed, ranks)
    if failed[0].state == "refused":
        # The group is not restarted, because the launcher would refuse the next start, too.
        return Step("failed", "failure", reason)
    if spec.restart == "never":
        over = len(failed) + sum(not row.failed for row in ended) == len(ranks)
        return Step("failed", "failure", reason) if over else None
    return _again(group, watched, "failure", reason, now, now_ns)


def _again(
    group: Group,
    watched: Watched,
    cause: str,
    reason: str,
    now: float,
    now_ns: int,
    without: tuple[str, ...] = (),
) -> Step | None:
    """Returns the restart once its pause is over, and None until then. The pause is 1 s at first and doubles with each
    restart since the owner's last order. Returns a failure if the group has reached its limit of restarts.
    """
    if watched.failed is None:
        watched.failed = now
    if not group.may_restart(cause, now_ns):
        limit = plural(group.spec.max_restarts, "restart")
        return Step("failed", cause, f"{reason}; its limit of {limit} within an hour is reached")
    if now - watched.failed < doubled(1.0, group.restarts, _MAX_PAUSE_S):
        return None
    return Step("restart", cause, reason, without)


def absences(group: Group, watched: Watched) -> Iterator[tuple[int, str, str]]:
    """Yields rank, node and a sentence for each rank of a running generation that is known not to run."""
    rows = {row.worker: row for each in watched.rows.values() for row in each or () if row.seen >= group.generation}
    for rank in group.ranks() if group.phase == "running" else ():
        row, name = rows.get(rank.worker), f"rank {rank.rank} of group {group.spec.name}"
        if watched.rows.get(rank.node, []) is None:
            yield rank.rank, rank.node, f"{name} is on node {rank.node}, which does not answer"
        elif row is None:
            yield rank.rank, rank.node, f"{name} was not started: no launcher serves worker {rank.worker}"
        elif row.state == "ended":
            yield rank.rank, rank.node, f"{name} ({rank.worker}) {_how(row)}"
        elif row.state in ("refused", "waiting", "fenced", "idle"):
            verb = "was ended" if row.state == "fenced" else "was not started"
            yield rank.rank, rank.node, f"{name} {verb} by worker {rank.worker}: {row.reason}"


def _failure_text(failed: Sequence[WorkerRow], ranks: Mapping[str, int]) -> str:
    """Returns the sentence about the ranks that failed. It explains the first failure and lists the later ones."""
    first = failed[0]
    if first.state == "refused":
        text = f"worker {first.worker} refused to start rank {ranks[first.worker]}: {first.reason}"
    elif first.state == "fenced":
        text = f"worker {first.worker} ended rank {ranks[first.worker]}: {first.reason}"
    else:
        text = f"rank {ranks[first.worker]} ({first.worker}) {_how(first)}"
    others = [ranks[row.worker] for row in failed[1:]]
    return f"{text}; then {ranks_of(others)}" if others else text


def _how(row: WorkerRow) -> str:
    if row.signal is not None:
        return f"was killed by {_SIGNALS.get(row.signal, f'signal {row.signal}')}"
    if row.exit_code is None:
        return f"ended: {row.reason}" if row.reason else "ended, with a status that is not known"
    return f"exited with {row.exit_code}"


def _gone(group: Group, watched: Watched, now: float) -> set[str]:
    nodes = {rank.node for rank in group.ranks()}
    return {node for node, (since, _) in watched.silent.items() if node in nodes and now - since > _GONE_S}


def _nodes_left(group: Group, without: set[str]) -> int:
    return len({rank.node for rank in group.ranks()} - without)
