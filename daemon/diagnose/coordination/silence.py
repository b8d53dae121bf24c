"""Finds the jobs whose leader finds nothing while they stand still, so that the next node diagnoses them, too.

Each node compares how far its own ranks have come. After three looks in a row in which they have not, the node that
comes after the leader diagnoses the job itself; the one after that does so after six, and so on. Where the leader has
shared an error, they do it once, for as long as a hang needs to be confirmed: a leader may name the wrong rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from probing.api.text import escape
from probing.daemon.diagnose.coordination.proofs import MAX_BEFORE, Proofs
from probing.diagnosis.verdict import ERROR

__all__ = ("LOOKS", "SilentLeaders")

LOOKS = 3
MAX_NOTED = 256
# A leader needs some seconds for its looks, however soon a job counts as stalled.
_LEAST_LOOK_S = 5.0
# Looks of a stall that follow each other confirm a hang within this time, s.
_CHECK_S = 20.0
_Key = tuple[str, str]
_Row = Mapping[str, Any]


@dataclass(slots=True)
class _Run:
    """``still``: looks in a row that found no rank further. ``until``: this node diagnoses the job until then
    (monotonic s); None: it does not. ``errors``: the open errors that other nodes shared. ``own``: those that this node
    found meanwhile, which it has to close. ``problem``: what is said of the leader, in words."""

    calls: int = -1
    still: int = 0
    until: float | None = None
    errors: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    problem: str = ""


class SilentLeaders:
    """``step`` is one look at the jobs that other nodes lead, every ``look_s`` seconds or 5. Safe for many threads."""

    def __init__(self, node: str, proofs: Proofs, look_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._proofs = proofs
        self._look_s = max(look_s, _LEAST_LOOK_S)
        self._now = now
        self._due = now() + look_s
        self._runs: dict[_Key, _Run] = {}

    def hold(self, runs: Mapping[_Key, bool]) -> None:
        """Follows these runs, and no others."""
        self._runs = {key: self._runs.get(key) or _Run() for key in runs}

    def replaces(self, job: str, run: str) -> bool:
        """Returns whether this node diagnoses a run beside its leader."""
        known = self._runs.get((job, run))
        return known is not None and (bool(known.own) or (known.until is not None and self._now() < known.until))

    def taken(self, row: _Row) -> None:
        """Notes a row of ``diagnosis.findings`` of another node."""
        known = self._runs.get(_key(row))
        if known is None or row["severity"] != ERROR:
            return
        if row["state"] != "open":
            known.errors.discard(row["finding_id"])
            known.own.discard(row["finding_id"])
        elif len(known.errors) < MAX_NOTED:
            known.errors.add(row["finding_id"])

    def shared(self, row: _Row) -> None:
        """Notes a row that this node found."""
        known = self._runs.get(_key(row))
        if known is None or row["severity"] != ERROR:
            return
        name = row["finding_id"]
        if row["state"] != "open":
            known.own.discard(name)
        elif known.until is not None:
            known.own.add(name)
            if name not in known.errors and (before := _before(self._proofs, self._node, *_key(row))):
                known.problem = (
                    f"job {escape(row['job'])}: node {before[0]} leads its diagnosis and has not shared"
                    f" {row['verdict']}, which this node found: ask node {before[0]} for its status"
                )

    @property
    def problems(self) -> list[str]:
        """Returns the leaders that were replaced, for ``status``."""
        return [known.problem for known in self._runs.values() if known.problem]

    def step(self) -> None:
        """Looks at all runs if that is due."""
        now = self._now()
        if now >= self._due:
            self._due = now + self._look_s
            for key, known in list(self._runs.items()):
                self._look(key, known, now)

    def _look(self, key: _Key, known: _Run, now: float) -> None:
        before = _before(self._proofs, self._node, *key)
        holding = self._proofs.holding(*key)
        # A leader's findings are taken once it is proven to take part.
        waits = self._proofs.is_new(*key) or not before or len(before) >= MAX_BEFORE
        if waits or not holding.living or holding.calls != known.calls:
            known.calls, known.still, known.until, known.problem = holding.calls, 0, None, ""
            return
        known.still += 1
        if known.still >= LOOKS * len(before) and known.until is None:
            known.until = now + _CHECK_S if known.errors else float("inf")


def _before(proofs: Proofs, node: str, job: str, run: str) -> list[str]:
    """Returns the nodes that are asked before ``node`` to diagnose a run, the leader first."""
    others = [one for one in proofs.holders(job, run) if one.living and not one.failed]
    return sorted(one.node for one in others if one.node < node)


def _key(row: _Row) -> _Key:
    return str(row["job"]), str(row["run"])
