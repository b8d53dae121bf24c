"""Starts the hook for new findings, one after the other in a thread of its own.

A connection to ``hook.sock`` starts a process that runs the configured command and posts the finding
(``daemon/confined/hook.py``).
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from typing import Any

from probing.api.errors import InternalError
from probing.daemon.config import DiagnoseConfig
from probing.daemon.diagnose.finding_row import finding_report
from probing.daemon.diagnose.problems import Problems
from probing.daemon.ipc import connect

__all__ = ("Hooks",)

CONNECT_S = 5.0
# The process starts an interpreter first.
MARGIN_S = 10.0
MAX_WAITING = 64
_HEADER = ("finding_id", "job", "run", "verdict", "severity", "sentence", "ranks", "nodes")


class Hooks:
    """Counts hooks that were ``started``, and findings without a hook that succeeded as ``failed``."""

    def __init__(self, path: str, node: str, config: DiagnoseConfig) -> None:
        self._path = path
        self._node = node
        self._wanted = bool(config.hook or config.webhook)
        # For the command and for the post.
        self._timeout = 2 * config.hook_timeout_s + MARGIN_S
        self._waiting: queue.Queue[Mapping[str, Any]] = queue.Queue(MAX_WAITING)
        self.problems = Problems()
        self.started = self.failed = 0

    def start(self) -> None:
        if self._wanted:
            threading.Thread(target=self._run, name="hooks", daemon=True).start()

    def post(self, row: Mapping[str, Any]) -> None:
        """Queues a row of ``diagnosis.findings`` for the hook, if one is configured. Does not wait."""
        if not self._wanted:
            return
        with self.problems.noted("findings without a hook"):
            try:
                self._waiting.put_nowait(row)
            except queue.Full as e:
                self.failed += 1
                raise InternalError(f"{MAX_WAITING} others wait already") from e

    @property
    def idle(self) -> bool:
        """Whether no hook runs or waits."""
        return not self._waiting.unfinished_tasks

    @property
    def detail(self) -> str:
        """Returns how many hooks were started, for ``status``; empty without a configured one."""
        return f"{self.started} hooks started, {self.failed} failed" if self._wanted else ""

    def _run(self) -> None:
        while True:
            row = self._waiting.get()
            with self.problems.noted("hook"):
                self.started += 1
                try:
                    self._start(row)
                except Exception:
                    self.failed += 1
                    raise
            self._waiting.task_done()

    def _start(self, row: Mapping[str, Any]) -> None:
        """Starts the hook process and waits for its end. Raises ProbingError when it failed."""
        header = {"op": "finding", "node": self._node, **{name: row.get(name) for name in _HEADER}}
        payload = json.dumps({"node": self._node, **finding_report(row)}).encode()
        with connect(self._path, CONNECT_S) as channel:
            answer = channel.request(header, payload, timeout=self._timeout)
            answer.close_fds()
        if failed := [str(text) for text in answer.header.get("failed", ())]:
            raise InternalError("; ".join(failed))
