"""Decides which node coordinates the diagnosis of a job, and gives its findings to the other nodes of the job.

The coordinator, or leader, of a job is the live node with the lowest name that takes part in the job (``proofs``). Each
node decides by itself which node leads: there is no election. While nodes disagree, two may coordinate: their findings
have the same ids, so that each finding counts once.

If the leader has no finding while a job stands still, the next nodes diagnose the job, too. Each node compares how far
its own ranks have come. After three consecutive looks without progress, the node after the leader also diagnoses the
job; the next node does after six looks, and so on. If another node has shared an open finding of severity error, these
nodes still diagnose the job, because that finding may blame the wrong rank. In this case they stop after the time that
confirming a hang takes, unless they have opened an error of their own, which they have to close.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from probing.api.errors import ProbingError
from probing.api.text import escape
from probing.daemon.diagnose.coordination.peers import answers
from probing.daemon.diagnose.coordination.proofs import MAX_BEFORE, Proofs
from probing.daemon.diagnose.problems import Problems
from probing.daemon.worker import Worker
from probing.diagnosis.verdict import ERROR

__all__ = ("LOOKS", "Coordinator", "SilentLeaders")

LOOKS = 3
MAX_NOTED = 256
# The minimum time between two looks, s. A leader needs some seconds for a finding, even if a job counts as stalled
# sooner.
_LEAST_LOOK_S = 5.0
# Two looks at a stalled job confirm a hang only if the second follows within this time, s.
_CHECK_S = 20.0
_Key = tuple[str, str]
_Row = Mapping[str, Any]


@dataclass(slots=True)
class _Run:
    """The state of one run that another node leads. ``still``: the number of consecutive looks in which no rank on this
    node had advanced. ``until``: because the ranks stand still, this node diagnoses the run beside its leader until
    this time, on time.monotonic(); None if it does not. ``errors``: the open errors that other nodes shared. ``own``:
    errors that this node opened while it diagnosed the run, and has to close. ``problem``: a text about the leader, for
    ``status``."""

    calls: int = -1
    still: int = 0
    until: float | None = None
    errors: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    problem: str = ""


class SilentLeaders:
    """Watches the leaders of jobs. ``step`` looks at the jobs that other nodes lead, every ``look_s`` seconds, but not
    more often than every 5 s. Thread-safe.
    """

    def __init__(self, node: str, proofs: Proofs, look_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._proofs = proofs
        self._look_s = max(look_s, _LEAST_LOOK_S)
        self._now = now
        self._due = now() + look_s
        self._runs: dict[_Key, _Run] = {}

    def hold(self, runs: Mapping[_Key, bool]) -> None:
        """Watches exactly ``runs``."""
        self._runs = {key: self._runs.get(key) or _Run() for key in runs}

    def replaces(self, job: str, run: str) -> bool:
        """Returns whether this node diagnoses a run in addition to its leader."""
        known = self._runs.get((job, run))
        return known is not None and (bool(known.own) or (known.until is not None and self._now() < known.until))

    def taken(self, row: _Row) -> None:
        """Notes a row of ``diagnosis.findings`` that another node shared."""
        known = self._runs.get(_key(row))
        if known is None or row["severity"] != ERROR:
            return
        if row["state"] != "open":
            known.errors.discard(row["finding_id"])
            known.own.discard(row["finding_id"])
        elif len(known.errors) < MAX_NOTED:
            known.errors.add(row["finding_id"])

    def shared(self, row: _Row) -> None:
        """Notes a row of ``diagnosis.findings`` of this node."""
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
        """Returns texts for ``status`` about leaders that this node stands in for."""
        return [known.problem for known in self._runs.values() if known.problem]

    def step(self) -> None:
        """Looks at all runs if a look is due."""
        now = self._now()
        if now >= self._due:
            self._due = now + self._look_s
            for key, known in list(self._runs.items()):
                self._look(key, known, now)

    def _look(self, key: _Key, known: _Run, now: float) -> None:
        before = _before(self._proofs, self._node, *key)
        holding = self._proofs.holding(*key)
        # This node accepts a leader's findings only when the leader is proven to take part.
        waits = self._proofs.is_new(*key) or not before or len(before) >= MAX_BEFORE
        if waits or not holding.living or holding.calls != known.calls:
            known.calls, known.still, known.until, known.problem = holding.calls, 0, None, ""
            return
        known.still += 1
        if known.still >= LOOKS * len(before) and known.until is None:
            known.until = now + _CHECK_S if known.errors else float("inf")


def _before(proofs: Proofs, node: str, job: str, run: str) -> list[str]:
    """Returns the nodes that diagnose a run before ``node`` does, the leader first."""
    others = [one for one in proofs.holders(job, run) if one.living and not one.failed]
    return sorted(one.node for one in others if one.node < node)


def _key(row: _Row) -> _Key:
    return str(row["job"]), str(row["run"])


SHARE_S = 2.0
STEP_S = 1.0
# The maximum number of rows that wait to be sent to other nodes, and the maximum number of times that one row is
# offered to a node. Offers are repeated because a node without the proof that this node takes part refuses the row. It
# accepts the row some seconds later, when it has the proof.
MAX_ROWS = 256
MAX_TRIES = 30
RETRY_S = 1.0


class _Offer(NamedTuple):
    """A row to share with ``nodes``, at ``due`` (monotonic s). ``tries``: the number of offers left."""

    due: float
    row: _Row
    nodes: Sequence[str]
    tries: int


class Coordinator:
    """The coordination of this node with the other nodes of its jobs. ``start`` begins the threads that share rows and
    examine claims.

    ``look_s``: this node checks every ``look_s`` seconds whether the jobs that other nodes lead stand still.
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
        self._thread = threading.Thread(target=self._run, name="share", daemon=True)
        self._looks = Worker("coordinate", self.step, lambda: STEP_S, patience_s=SHARE_S)
        self._failures = Problems()
        self.shared = self.dropped = 0

    @property
    def problems(self) -> list[str]:
        """Returns texts for ``status`` about problems of the coordination."""
        return [*self._silence.problems, *self._proofs.problems, *self._failures]

    def start(self) -> None:
        self._thread.start()
        self._looks.start()

    def stop(self) -> None:
        with self._waiting:
            self._stopped = True
            self._waiting.notify()
        self._looks.stop()

    def step(self) -> None:
        """Examines the claims of other nodes, and looks at silent leaders, if that is due."""
        self._proofs.step()
        self._silence.step()

    def hold(self, runs: Mapping[tuple[str, str], bool]) -> None:
        """Publishes the runs (job, run) with ranks on this node, and whether a rank of each still lives."""
        self._proofs.hold(runs)
        self._silence.hold(runs)

    def leads(self, job: str, run: str, *, living: bool) -> bool:
        """Returns whether this node diagnoses a run: as its coordinator, or because the coordinator is silent.

        ``living``: a rank of the run lives on this node.
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
                    # A node that is being restarted accepts the row soon.
                    self._queue(_Offer(time.monotonic() + RETRY_S, offer.row, left, offer.tries - 1), newer=False)
            else:
                self.dropped += bool(left)

    def _queue(self, offer: _Offer, *, newer: bool = True) -> None:
        """Adds an offer. Only the newest row of a finding is offered: an older row would open a closed finding
        again.
        """
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
        """Waits for the next due offer, removes and returns it; returns None after the stop."""
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
        """Sends the row to all ``nodes`` at once. Returns the nodes that did not accept it."""
        outcomes = answers({node: self._proofs.record(node, [row], SHARE_S) for node in nodes}, SHARE_S)
        failed = {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, ProbingError)}
        for node in nodes:
            with self._failures.noted(f"findings for node {node}"):
                if node in failed:
                    raise failed[node]
        self.shared += len(failed) < len(nodes)
        return list(failed)


def _finding(row: _Row) -> tuple[object, ...]:
    return row["job"], row["run"], row.get("finding_id")
