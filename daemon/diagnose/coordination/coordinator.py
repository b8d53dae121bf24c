"""Decides which node coordinates the diagnosis of a job, and gives its findings to the other nodes of the job.

The coordinator is the live node with the lowest name that takes part in the job (``proofs``). Each node decides that by
itself: there is no election. While two nodes know different ones, both may coordinate: their findings have the same
ids, so that they count once. A node that comes after a coordinator which finds nothing diagnoses the job, too
(``silence``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.daemon.diagnose.coordination.silence import SilentLeaders
from probing.daemon.diagnose.problems import Problems
from probing.daemon.worker import Worker

__all__ = ("Coordinator",)

SHARE_S = 2.0
STEP_S = 1.0
# Rows that wait for nodes that do not take them, and how often each is offered to a node: one without proof that this
# node takes part has it some seconds later.
MAX_ROWS = 256
MAX_TRIES = 30
RETRY_S = 1.0
MAX_SHARING = 16
_Row = Mapping[str, Any]


class _Offer(NamedTuple):
    """A row for ``nodes``, to be offered at ``due`` (monotonic s), so many ``tries`` at most."""

    due: float
    row: _Row
    nodes: Sequence[str]
    tries: int


class Coordinator:
    """Implements ``watch.Cluster``. ``start`` begins the threads that share rows and look at claims.

    ``look_s``: seconds between two looks at whether a job that another node leads stands still.
    """

    def __init__(
        self, node: str, proofs: Proofs, *, look_s: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._proofs = proofs
        self._silence = SilentLeaders(node, proofs, look_s, now=now)
        self._offers: list[_Offer] = []
        self._waiting = threading.Condition()
        self._stopped = False
        self._pool = ThreadPoolExecutor(MAX_SHARING, thread_name_prefix="share")
        self._thread = threading.Thread(target=self._run, name="share", daemon=True)
        self._looks = Worker("coordinate", self.step, lambda: STEP_S, patience_s=SHARE_S)
        self._failures = Problems()
        self.shared = self.dropped = 0

    @property
    def problems(self) -> list[str]:
        """Returns what is wrong with the coordination of jobs, for ``status``."""
        return [*self._silence.problems, *self._proofs.problems, *self._failures]

    def start(self) -> None:
        self._thread.start()
        self._looks.start()

    def stop(self) -> None:
        with self._waiting:
            self._stopped = True
            self._waiting.notify()
        self._looks.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._proofs.close()

    def step(self) -> None:
        """Looks at the claims of other nodes, and at silent leaders, where that is due."""
        self._proofs.step()
        self._silence.step()

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether one of these lives."""
        self._proofs.hold(runs)
        self._silence.hold(runs)

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        """Returns whether this node diagnoses a run: as its coordinator, or beside one that is silent.

        ``living``: a rank of it lives here.
        """
        return not self.is_beside(job, run, living=living) or self._silence.replaces(job, run)

    def is_beside(self, job: str, run: str, *, living: bool) -> bool:
        """Returns whether another node is the coordinator of a run."""
        others = [one for one in self._proofs.holders(job, run) if not one.failed]
        if any(one.living for one in others) and not living:
            return True
        return any(one.node < self._node and (one.living or not living) for one in others)

    def taken(self, row: _Row) -> None:
        """Notes a row of ``diagnosis.findings`` that another node has shared."""
        self._silence.taken(row)

    def share(self, row: _Row) -> None:
        """Queues a row of ``diagnosis.findings`` for the other nodes of its job. Does not wait."""
        self._silence.shared(row)
        nodes = [one.node for one in self._proofs.holders(str(row["job"]), str(row["run"])) if not one.failed]
        if not nodes:
            return
        with self._waiting:
            self._queue(_Offer(0.0, row, nodes, MAX_TRIES))
            self._waiting.notify()

    def _run(self) -> None:
        while (offer := self._next()) is not None:
            left = self._offer(offer.row, offer.nodes)
            if left and offer.tries > 1:
                with self._waiting:
                    # A node that is being restarted takes it soon.
                    self._queue(_Offer(time.monotonic() + RETRY_S, offer.row, left, offer.tries - 1), newer=False)
            else:
                self.dropped += bool(left)

    def _queue(self, offer: _Offer, *, newer: bool = True) -> None:
        """Adds an offer. Of a finding the newer row is offered alone: an older one would open again what is closed."""
        other = next((one for one in self._offers if _finding(one.row) == _finding(offer.row)), None)
        if other is not None:
            self._offers.remove(other)
            row, nodes = (offer if newer else other).row, tuple(dict.fromkeys((*offer.nodes, *other.nodes)))
            offer = _Offer(min(offer.due, other.due), row, nodes, max(offer.tries, other.tries))
        if len(self._offers) == MAX_ROWS:
            self._offers.remove(min(self._offers, key=lambda one: one.tries))
            self.dropped += 1
        self._offers.append(offer)

    def _next(self) -> _Offer | None:
        """Waits for the offer that is due first; None at the stop."""
        with self._waiting:
            while not self._stopped:
                offer = min(self._offers, key=lambda one: one.due, default=None)
                now = time.monotonic()
                if offer is not None and offer.due <= now:
                    self._offers.remove(offer)
                    return offer
                self._waiting.wait(None if offer is None else offer.due - now)
        return None

    def _offer(self, row: _Row, nodes: Sequence[str]) -> list[str]:
        """Gives the row to all nodes at once. Returns those that did not take it."""

        def give(node: str) -> bool:
            with self._failures.noted(f"findings for node {node}"):
                self._proofs.record(node, [row], SHARE_S)
                return True
            return False

        try:
            taken = list(self._pool.map(give, nodes))
        except RuntimeError:
            # The pool was shut down.
            return []
        self.shared += any(taken)
        return [node for node, done in zip(nodes, taken, strict=True) if not done]


def _finding(row: _Row) -> tuple[object, ...]:
    return row["job"], row["run"], row.get("finding_id")
