"""Starts the hook for new findings, one at a time in a thread: owners and their jobs take turns.

A connection to ``hook.sock`` starts a process that runs the configured command and posts the finding
(``daemon/confined/hook.py``).

No owner keeps another owner waiting for more than one hook. When the queue is full, the owner with the most findings
loses the newest finding. A hook that failed is tried again after a pause that doubles.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from probing.api.errors import InternalError
from probing.daemon.backoff import Pauses
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.finding_row import finding_report
from probing.daemon.diagnose.problems import Problems
from probing.daemon.ipc import connect

__all__ = ("MAX_WAITING", "HookQueue", "Hooks", "job_itself")

MAX_WAITING = 64
# The maximum number of tries of one hook. With the pauses in between they take about half an hour.
MAX_TRIES = 8
# The time between two checks of findings that wait for their next try, s.
LOOK_S = 1.0
_Row = Mapping[str, Any]


def job_itself(job: str, run: str) -> Hashable:
    """Returns ``job`` in place of the owner of the run, for older versions, which do not name owners."""
    del run
    return job


@dataclass(slots=True)
class _WaitingFinding:
    """A row of ``diagnosis.findings`` that waits. ``tries``: how often its hook failed; ``parts``: the parts of the
    hook that have to be tried again; empty: all."""

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


_Findings = OrderedDict[str, _WaitingFinding]
_Jobs = OrderedDict[tuple[str, str], _Findings]


class HookQueue:
    """The findings that wait for a hook. Thread-safe. ``owner_of`` returns the owner of a run of a job."""

    def __init__(self, owner_of: Callable[[str, str], Hashable] = job_itself) -> None:
        self._owner_of = owner_of
        self._changed = threading.Condition()
        self._pauses = Pauses()
        # Waiting findings by owner and job. The owner whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, _Jobs] = OrderedDict()

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    @property
    def due(self) -> bool:
        """Whether a finding waits for a hook; findings that wait for their next try do not count."""
        with self._changed:
            return self._next() is not None

    def put(self, row: _Row) -> bool:
        """Queues a row of ``diagnosis.findings``, replacing an older row of the same finding. Returns False if the
        queue was full, so that this or another finding was dropped."""
        finding = _WaitingFinding(self._owner_of(str(row["job"]), str(row["run"])), row)
        with self._changed:
            return self._put(finding)

    def take(self) -> _WaitingFinding:
        """Waits for the finding whose turn it is, and removes it."""
        with self._changed:
            while (finding := self._next()) is None:
                self._changed.wait(LOOK_S if self._waiting else None)
            self._remove(finding)
            self._waiting[finding.owner] = self._waiting.pop(finding.owner, _Jobs())
            self._drop_empty(finding.owner)
            return finding

    def succeeded(self, finding: _WaitingFinding) -> None:
        """Drops the failures of ``finding``."""
        with self._changed:
            self._pauses.worked((finding.key,))

    def failed(self, finding: _WaitingFinding, parts: tuple[str, ...] = ()) -> bool:
        """Queues ``finding`` again, for ``parts`` of its hook, after a pause. Returns False if ``finding`` is given up,
        or the queue was full."""
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

    def _put(self, finding: _WaitingFinding) -> bool:
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

    def _loser(self, new: _WaitingFinding) -> _WaitingFinding:
        """Returns the finding to drop for ``new``: the newest finding in the largest job of the owner with the most
        findings. That is ``new`` itself if its owner and its job have the most findings."""
        owned = {owner: sum(map(len, jobs.values())) for owner, jobs in self._waiting.items()}
        crowd = max(owned, key=lambda owner: owned[owner])
        own = owned[new.owner] + 1 >= owned[crowd]
        jobs = self._waiting[new.owner if own else crowd]
        # If several jobs are the largest, the last counts.
        job = max(reversed(jobs), key=lambda name: len(jobs[name]))
        if own and len(jobs[new.job]) + 1 >= len(jobs[job]):
            return new
        return next(reversed(jobs[job].values()))

    def _next(self) -> _WaitingFinding | None:
        every = (one for jobs in self._waiting.values() for findings in jobs.values() for one in findings.values())
        return next((finding for finding in every if not self._pauses.held(finding.key)), None)

    def _remove(self, finding: _WaitingFinding) -> None:
        jobs = self._waiting[finding.owner]
        findings = jobs.pop(finding.job)
        findings.pop(finding.key, None)
        if findings:
            # Moves the job to the end, so that the other jobs of the owner come first.
            jobs[finding.job] = findings

    def _drop_empty(self, owner: Hashable) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _count(self) -> int:
        return sum(len(findings) for jobs in self._waiting.values() for findings in jobs.values())


CONNECT_S = 5.0
# The time limit of a hook is the sum of the limits of its command and of its post, plus this time, s, in which its
# process starts an interpreter.
MARGIN_S = 10.0
_HEADER = ("finding_id", "job", "run", "verdict", "severity", "sentence", "ranks", "nodes")


class Hooks:
    """Runs hooks. Counts the hooks that ``started`` and ``failed``, and the findings that are ``lost`` because the
    queue was full or they were given up. ``owner_of`` returns the owner of a run of a job; owners take turns."""

    def __init__(
        self,
        path: str,
        node: str,
        config: DiagnoseConfig,
        owner_of: Callable[[str, str], Hashable] = job_itself,
    ) -> None:
        self._path = path
        self._node = node
        self._wanted = bool(config.hook or config.webhook)
        # The time for the command and for the post.
        self._timeout = 2 * config.hook_timeout_s + MARGIN_S
        self._waiting = HookQueue(owner_of)
        self._running = False
        self.problems = Problems()
        self.started = self.failed = self.lost = 0

    def start(self) -> None:
        if self._wanted:
            threading.Thread(target=self._run, name="hooks", daemon=True).start()

    def post(self, row: Mapping[str, Any]) -> None:
        """Queues a row of ``diagnosis.findings`` for the hook, if one is configured. Does not wait."""
        if not self._wanted:
            return
        with self.problems.noted("findings without a hook"):
            if not self._waiting.put(row):
                self.lost += 1
                raise InternalError(f"{MAX_WAITING} findings wait already")

    @property
    def idle(self) -> bool:
        """Returns whether no hook runs and no finding is due. A finding that waits for its next try is not due."""
        return not self._running and not self._waiting.due

    @property
    def counts(self) -> dict[str, int]:
        """Returns how many runs of the hook started and failed, and how many findings were lost, for /metrics; empty if
        no hook is configured.
        """
        return {"started": self.started, "failed": self.failed, "lost": self.lost} if self._wanted else {}

    @property
    def detail(self) -> str:
        """Returns a text about the hooks that were started, for ``status``; empty without a configured hook."""
        if not self._wanted:
            return ""
        waiting, lost = len(self._waiting), f", {self.lost} findings without one" if self.lost else ""
        waits = f", {waiting} wait" if waiting else ""
        return f"{self.started} hooks started, {self.failed} failed{waits}{lost}"

    def _run(self) -> None:
        while True:
            finding = self._waiting.take()
            self._running = True
            try:
                with self.problems.noted("hook"):
                    self._try(finding)
            finally:
                self._running = False

    def _try(self, finding: _WaitingFinding) -> None:
        """Runs the hook of ``finding``. Raises ProbingError when it failed; the failed parts are tried again then."""
        self.started += 1
        try:
            answer = self._start(finding)
        except Exception:
            self.failed += 1
            self.lost += not self._waiting.failed(finding, finding.parts)
            raise
        texts = [str(text) for text in answer.get("failed", ())]
        self.failed += bool(texts)
        if again := tuple(str(part) for part in answer.get("again", ())):
            self.lost += not self._waiting.failed(finding, again)
        else:
            self._waiting.succeeded(finding)
        if texts:
            raise InternalError("; ".join(texts))

    def _start(self, finding: _WaitingFinding) -> Mapping[str, Any]:
        """Starts the hook process, waits for its end, and returns its answer. Raises ProbingError."""
        row = finding.row
        header = {"op": "finding", "node": self._node, **{name: row.get(name) for name in _HEADER}}
        payload = json.dumps({"node": self._node, **finding_report(row)}).encode()
        with connect(self._path, CONNECT_S) as channel:
            answer = channel.request({**header, "parts": list(finding.parts)}, payload, timeout=self._timeout)
            answer.close_fds()
        return answer.header
