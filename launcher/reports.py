"""Rows of a launcher's report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from probing.api.text import plural
from probing.groups.group import Group
from probing.launcher.census import Member
from probing.launcher.children import Child
from probing.launcher.decisions import Verdict
from probing.launcher.held import Held
from probing.launcher.processes import still_alive
from probing.launcher.state import Run

__all__ = ("Refusals", "row")

_MAX_REFUSALS = 256
_K = TypeVar("_K")
_V = TypeVar("_V")


def row(
    held: Held, worker: str, child: Child | None, verdict: Verdict, *, restarts: int, members: Sequence[Member]
) -> dict[str, Any]:
    """Returns what became of ``worker`` in a group. ``child``: the process of its last run, if it is alive.

    ``restarts``: starts without an order within an hour. ``members``: processes of the generation of the last run.
    """
    history, run = held.history, held.run_of(worker)
    common = {
        "worker": worker,
        "group": history.name,
        "seen": history.generation,
        "clear": held.cleared >= history.generation,
        "restarts": restarts,
    }
    if run is not None and (child or run.generation == history.generation or verdict.state == "idle"):
        return {**common, **_run(held, run, child), **_left(run, child, members)}
    rank = next((ranked.rank for ranked in held.ranks if ranked.worker == worker), None)
    state: str = "starting" if verdict.state == "start" else verdict.state
    reason = verdict.reason
    if held.history.phase == "running" and rank is None:
        state, reason = "idle", f"generation {history.generation} has no rank for this worker"
    elif rank is not None and history.started >= history.generation:
        state = "ended"
        reason = f"generation {history.generation} was begun before, without a record of this rank: it starts only once"
    return {
        **common,
        **_EMPTY,
        "log": run.log if run else "",
        "generation": history.generation,
        "rank": rank,
        "state": state,
        "since_ns": held.group.since_ns if held.group else 0,
        "reason": reason,
    }


class Refusals:
    """Records that were refused, as rows."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = workers
        self._unknown: dict[str, list[dict[str, Any]]] = {}
        self._said: dict[tuple[str, str], None] = {}
        self._new: list[dict[str, Any]] = []

    def add(self, group: Group, reason: str, known: bool) -> None:
        """Notes a refusal. ``known``: whether another record of the group was taken."""
        name = group.spec.name
        workers = [worker for worker in self._workers if worker in group.spec.workers]
        rows = [_refusal(group, worker, 0 if known else group.generation, reason) for worker in workers]
        if not known:
            # Nobody needs to know why what is not to run is refused.
            self._unknown.pop(name, None)
            if group.phase in ("ending", "running"):
                _put(self._unknown, name, rows)
        elif (name, reason) not in self._said:
            _put(self._said, (name, reason), None)
            self._new = [*self._new, *rows][-_MAX_REFUSALS:]

    def forget(self, name: str) -> None:
        """Notes that a record of group ``name`` was taken."""
        self._unknown.pop(name, None)

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of refusals: once, if another record of the group was taken."""
        new, self._new = self._new, []
        return [*(row for rows in self._unknown.values() for row in rows), *new]


def _put(bounded: dict[_K, _V], key: _K, value: _V) -> None:
    while len(bounded) >= _MAX_REFUSALS:
        del bounded[next(iter(bounded))]
    bounded[key] = value


def _refusal(group: Group, worker: str, generation: int, reason: str) -> dict[str, Any]:
    return {
        "worker": worker,
        "group": group.spec.name,
        "seen": 0,
        "clear": False,
        "restarts": 0,
        **_EMPTY,
        "generation": generation,
        "state": "refused",
        "since_ns": group.since_ns,
        "reason": reason,
    }


def _left(run: Run, child: Child | None, members: Sequence[Member]) -> dict[str, Any]:
    """Returns what is said of processes that are left of a rank whose first process has ended."""
    if child is not None:
        return {}
    left = sum(member.rank == run.rank and still_alive(member.stat) for member in members)
    if not left:
        return {}
    runs = "runs" if left == 1 else "run"
    return {"left": left, "reason": f"{run.reason}; {plural(left, 'process')} of it still {runs}"}


def _run(held: Held, run: Run, child: Child | None) -> dict[str, Any]:
    if child is None:
        state = "fenced" if run.fenced else "ended"
    elif held.ending is not None and run.generation < held.ending.below:
        state = "ending"
    else:
        state = "starting" if child.report >= 0 else "running"
    return {
        "generation": run.generation,
        "rank": run.rank,
        "state": state,
        "pid": run.pid or None,
        "start_ns": run.start_ns or None,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "since_ns": run.ended_ns or run.began_ns,
        "reason": run.reason,
        "log": run.log,
        "left": 0,
    }


_EMPTY: dict[str, Any] = {
    "rank": None,
    "pid": None,
    "start_ns": None,
    "exit_code": None,
    "signal": None,
    "log": "",
    "left": 0,
}
