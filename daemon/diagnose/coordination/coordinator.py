"""Decides which node coordinates the diagnosis of a job, and gives its findings to the other nodes of the job.

The coordinator is the live node with the lowest name that holds a rank of the job. Each node decides that by itself,
from the membership: there is no election, and no message more. While the membership of two nodes differs, both may
coordinate: their findings have the same ids, so that they count once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from probing.daemon.diagnose.coordination.peers import Peers
from probing.daemon.diagnose.problems import Problems

__all__ = ("Coordinator",)

SHARE_S = 2.0
# Rows that wait for nodes that do not take them, and how often each is offered to a node.
MAX_ROWS = 256
MAX_TRIES = 3
RETRY_S = 1.0
MAX_SHARING = 16
_Row = Mapping[str, Any]


class Coordinator:
    """Implements ``watch.Cluster``. ``start`` begins the thread that shares rows."""

    def __init__(self, node: str, peers: Peers) -> None:
        self._node = node
        self._peers = peers
        self._rows: deque[tuple[_Row, list[str], int]] = deque()
        self._waiting = threading.Condition()
        self._stopped = False
        self._pool = ThreadPoolExecutor(MAX_SHARING, thread_name_prefix="share")
        self._thread = threading.Thread(target=self._run, name="share", daemon=True)
        self.problems = Problems()
        self.shared = self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._waiting:
            self._stopped = True
            self._waiting.notify()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether one of these lives."""
        self._peers.hold(runs)

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        """Returns whether this node coordinates a run. ``living``: a rank of it lives here."""
        others = [one for one in self._peers.holders(job, run) if not one.failed]
        if living:
            return all(self._node < one.node for one in others if one.living)
        return not any(one.living for one in others) and all(self._node < one.node for one in others)

    def share(self, row: _Row) -> None:
        """Queues a row of ``diagnosis.findings`` for the other nodes of its job. Does not wait."""
        nodes = [one.node for one in self._peers.holders(str(row["job"]), str(row["run"])) if not one.failed]
        if not nodes:
            return
        with self._waiting:
            if len(self._rows) == MAX_ROWS:
                self._rows.popleft()
                self.dropped += 1
            self._rows.append((row, nodes, MAX_TRIES))
            self._waiting.notify()

    def _run(self) -> None:
        while True:
            with self._waiting:
                self._waiting.wait_for(lambda: self._rows or self._stopped)
                if self._stopped:
                    return
                row, nodes, tries = self._rows.popleft()
            left = self._offer(row, nodes)
            if left and tries > 1:
                with self._waiting:
                    self._rows.append((row, left, tries - 1))
                    # A node that is being restarted takes it soon.
                    self._waiting.wait_for(lambda: self._stopped, RETRY_S)
            else:
                self.dropped += bool(left)

    def _offer(self, row: _Row, nodes: list[str]) -> list[str]:
        """Gives the row to all nodes at once. Returns those that did not take it."""

        def give(node: str) -> bool:
            with self.problems.noted(f"findings for node {node}"):
                self._peers.record(node, [row], SHARE_S)
                return True
            return False

        try:
            taken = list(self._pool.map(give, nodes))
        except RuntimeError:
            # The pool was shut down.
            return []
        self.shared += any(taken)
        return [node for node, done in zip(nodes, taken, strict=True) if not done]
