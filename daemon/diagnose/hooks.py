"""Starts the hook for new findings, one after the other in a thread of its own, in the order of ``hook_queue``.

A connection to ``hook.sock`` starts a process that runs the configured command and posts the finding
(``daemon/confined/hook.py``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from probing.api.errors import InternalError
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.finding_row import finding_report
from probing.daemon.diagnose.hook_queue import MAX_WAITING, HookQueue, WaitingFinding, job_itself
from probing.daemon.diagnose.problems import Problems
from probing.daemon.ipc import connect

__all__ = ("Hooks",)

CONNECT_S = 5.0
# The process starts an interpreter first.
MARGIN_S = 10.0
_HEADER = ("finding_id", "job", "run", "verdict", "severity", "sentence", "ranks", "nodes")


class Hooks:
    """Counts hooks that were ``started`` and that ``failed``, and findings that are ``lost``: they found no place, or
    were given up. ``owner_of`` returns the owner of a run of a job; owners take turns."""

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
        # For the command and for the post.
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
                raise InternalError(f"{MAX_WAITING} others wait already")

    @property
    def idle(self) -> bool:
        """Whether no hook runs, and none waits but for its next try."""
        return not self._running and not self._waiting.due

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of hooks by outcome, for /metrics; empty without a configured hook."""
        return {"started": self.started, "failed": self.failed, "lost": self.lost} if self._wanted else {}

    @property
    def detail(self) -> str:
        """Returns how many hooks were started, for ``status``; empty without a configured one."""
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

    def _try(self, finding: WaitingFinding) -> None:
        """Raises ProbingError when the hook failed; the parts that did are tried again then."""
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

    def _start(self, finding: WaitingFinding) -> Mapping[str, Any]:
        """Starts the hook process, waits for its end, and returns what it answered. Raises ProbingError."""
        row = finding.row
        header = {"op": "finding", "node": self._node, **{name: row.get(name) for name in _HEADER}}
        payload = json.dumps({"node": self._node, **finding_report(row)}).encode()
        with connect(self._path, CONNECT_S) as channel:
            answer = channel.request({**header, "parts": list(finding.parts)}, payload, timeout=self._timeout)
            answer.close_fds()
        return answer.header
