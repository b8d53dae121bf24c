"""The findings that wait for their hooks: owners take turns, and so do the jobs of an owner.

No owner keeps another waiting for more than one hook, and where all places are taken, the owner with the most findings
loses the newest one. A hook that failed is tried again after a pause that doubles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from probing.daemon.net.pauses import Pauses

__all__ = ("MAX_WAITING", "HookQueue", "WaitingFinding", "job_itself")

MAX_WAITING = 64
# With the pauses between them some half an hour.
MAX_TRIES = 8
# How often findings are looked at that wait for their next try, s.
LOOK_S = 1.0
_Row = Mapping[str, Any]


def job_itself(job: str, run: str) -> Hashable:
    """Returns the owner of a run where nothing is known of owners: its job."""
    del run
    return job


@dataclass(slots=True)
class WaitingFinding:
    """A row of ``diagnosis.findings``. ``tries``: how many hooks of it have failed; ``parts``: of the hook, those that
    have to be tried again, empty: all."""

    owner: Hashable
    row: _Row
    tries: int = 0
    parts: tuple[str, ...] = ()

    @property
    def job(self) -> tuple[str, str]:
        return str(self.row["job"]), str(self.row["run"])

    @property
    def key(self) -> str:
        return f"{self.row['finding_id']} {self.job}"


_Findings = OrderedDict[str, WaitingFinding]
_Jobs = OrderedDict[tuple[str, str], _Findings]


class HookQueue:
    """Safe for any thread. ``owner_of`` returns the owner of a run of a job."""

    def __init__(self, owner_of: Callable[[str, str], Hashable] = job_itself) -> None:
        self._owner_of = owner_of
        self._changed = threading.Condition()
        self._pauses = Pauses()
        # By owner and job; the next one first.
        self._waiting: OrderedDict[Hashable, _Jobs] = OrderedDict()

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    @property
    def due(self) -> bool:
        """Whether a finding waits for a hook, and not for its next try alone."""
        with self._changed:
            return self._next() is not None

    def put(self, row: _Row) -> bool:
        """Queues a row of ``diagnosis.findings``, in place of an older one of the same finding. Returns False if it, or
        another one for it, has found no place."""
        finding = WaitingFinding(self._owner_of(str(row["job"]), str(row["run"])), row)
        with self._changed:
            return self._put(finding)

    def take(self) -> WaitingFinding:
        """Waits for the finding whose turn it is, and removes it."""
        with self._changed:
            while (finding := self._next()) is None:
                self._changed.wait(LOOK_S if self._waiting else None)
            self._remove(finding)
            self._waiting[finding.owner] = self._waiting.pop(finding.owner, _Jobs())
            self._drop_empty(finding.owner)
            return finding

    def succeeded(self, finding: WaitingFinding) -> None:
        """Forgets the failures of ``finding``."""
        with self._changed:
            self._pauses.worked((finding.key,))

    def failed(self, finding: WaitingFinding, parts: tuple[str, ...] = ()) -> bool:
        """Queues ``finding`` again, for ``parts`` of its hook, after a pause. Returns False if it is given up, or finds
        no place."""
        finding.tries += 1
        finding.parts = parts
        with self._changed:
            if finding.tries >= MAX_TRIES:
                self._pauses.worked((finding.key,))
                return False
            self._pauses.failed(finding.key)
            # A newer row of the finding may wait already.
            newer = self._waiting.get(finding.owner, _Jobs()).get(finding.job, _Findings()).get(finding.key)
            return newer is not None or self._put(finding)

    def _put(self, finding: WaitingFinding) -> bool:
        jobs = self._waiting.setdefault(finding.owner, _Jobs())
        findings = jobs.setdefault(finding.job, _Findings())
        if (older := findings.get(finding.key)) is not None:
            older.row = finding.row
            return True
        lost = self._loser(finding) if self._count() >= MAX_WAITING else None
        if lost is not finding:
            findings[finding.key] = finding
            self._changed.notify()
        if lost is not None:
            self._remove(lost)
            self._drop_empty(lost.owner)
            self._pauses.worked((lost.key,))
        return lost is None

    def _loser(self, new: WaitingFinding) -> WaitingFinding:
        """Returns the finding that finds no place if ``new`` comes: the newest one of the owner with the most, and of
        its job with the most; ``new`` itself where these are its own."""
        owned = {owner: sum(map(len, jobs.values())) for owner, jobs in self._waiting.items()}
        crowd = max(owned, key=lambda owner: owned[owner])
        own = owned[new.owner] + 1 >= owned[crowd]
        jobs = self._waiting[new.owner if own else crowd]
        # Of equal ones the last.
        job = max(reversed(jobs), key=lambda name: len(jobs[name]))
        if own and len(jobs[new.job]) + 1 >= len(jobs[job]):
            return new
        return next(reversed(jobs[job].values()))

    def _next(self) -> WaitingFinding | None:
        every = (one for jobs in self._waiting.values() for findings in jobs.values() for one in findings.values())
        return next((finding for finding in every if not self._pauses.held(finding.key)), None)

    def _remove(self, finding: WaitingFinding) -> None:
        jobs = self._waiting[finding.owner]
        findings = jobs.pop(finding.job)
        findings.pop(finding.key, None)
        if findings:
            # The other jobs of the owner come first now.
            jobs[finding.job] = findings

    def _drop_empty(self, owner: Hashable) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _count(self) -> int:
        return sum(len(findings) for jobs in self._waiting.values() for findings in jobs.values())
