"""Rows of a launcher's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from probing.api.text import plural
from probing.groups.group import Group
from probing.groups.report import WorkerRow, WorkerState
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
) -> WorkerRow:
    """Returns the row of ``worker`` in a group. ``child``: the process of its last run, if that process is alive.

    ``restarts``: the number of starts within an hour that the owner did not order. ``members``: processes of the
    generation of the last run.
    """
    history, run, newest = held.history, held.run_of(worker), held.history.generation
    clear = held.cleared >= newest
    state: WorkerState = "starting" if verdict.state == "start" else verdict.state
    row = WorkerRow(worker, history.name, newest, newest, clear, state, reason=verdict.reason, restarts=restarts)
    if run is not None and (child or run.generation == newest or verdict.state == "idle"):
        return _of_run(row, held, run, child, members)
    rank = next((ranked.rank for ranked in held.ranks if ranked.worker == worker), None)
    since_ns = held.group.since_ns if held.group else 0
    row = replace(row, rank=rank, log=run.log if run else "", since_ns=since_ns)
    if history.phase == "running" and rank is None:
        return replace(row, state="idle", reason=f"generation {newest} has no rank for this worker")
    if rank is not None and history.started >= newest:
        reason = f"generation {newest} was started before, without a record of this rank: no generation starts twice"
        return replace(row, state="ended", reason=reason)
    return row


class Refusals:
    """Records that were refused, as rows."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = workers
        self._unknown: dict[str, list[WorkerRow]] = {}
        self._said: dict[tuple[str, str], None] = {}
        self._new: list[WorkerRow] = []

    def add(self, group: Group, reason: str, known: bool) -> None:
        """Notes a refusal. ``known``: whether another record of the group was accepted."""
        name = group.spec.name
        workers = [worker for worker in self._workers if worker in group.spec.workers]
        rows = [_refusal(group, worker, 0 if known else group.generation, reason) for worker in workers]
        if not known:
            # A refusal is shown only if the record would start or run ranks.
            self._unknown.pop(name, None)
            if group.phase in ("ending", "running"):
                _put(self._unknown, name, rows)
        elif (name, reason) not in self._said:
            _put(self._said, (name, reason), None)
            self._new = [*self._new, *rows][-_MAX_REFUSALS:]

    def forget(self, name: str) -> None:
        """Notes that a record of group ``name`` was accepted."""
        self._unknown.pop(name, None)

    def rows(self) -> list[WorkerRow]:
        """Returns the rows of refusals. If another record of the group was accepted, a refusal is returned once."""
        new, self._new = self._new, []
        return [*(row for rows in self._unknown.values() for row in rows), *new]


def _put(bounded: dict[_K, _V], key: _K, value: _V) -> None:
    while len(bounded) >= _MAX_REFUSALS:
        del bounded[next(iter(bounded))]
    bounded[key] = value


def _refusal(group: Group, worker: str, generation: int, reason: str) -> WorkerRow:
    return WorkerRow(worker, group.spec.name, generation, 0, False, "refused", since_ns=group.since_ns, reason=reason)


def _of_run(row: WorkerRow, held: Held, run: Run, child: Child | None, members: Sequence[Member]) -> WorkerRow:
    left, reason = 0, run.reason
    if child is None and (left := sum(member.rank == run.rank and still_alive(member.stat) for member in members)):
        runs = "runs" if left == 1 else "run"
        reason = f"{reason}; {plural(left, 'process')} of it still {runs}"
    return replace(
        row,
        generation=run.generation,
        state=_state(held, run, child),
        rank=run.rank,
        pid=run.pid or None,
        start_ns=run.start_ns or None,
        exit_code=run.exit_code,
        signal=run.signal,
        since_ns=run.ended_ns or run.began_ns,
        reason=reason,
        log=run.log,
        left=left,
    )


def _state(held: Held, run: Run, child: Child | None) -> WorkerState:
    if child is None:
        return "fenced" if run.fenced else "ended"
    if held.ending is not None and run.generation < held.ending.below:
        return "ending"
    return "starting" if child.report >= 0 else "running"
