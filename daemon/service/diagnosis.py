"""The diagnosis of jobs in the service: the watch that runs all the time, with its store, gatherer and hooks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probing.daemon.config import Config
from probing.daemon.diagnose.coordination.coordinator import Coordinator
from probing.daemon.diagnose.coordination.job_facts import JobFacts
from probing.daemon.diagnose.coordination.peers import Peers, Sight
from probing.daemon.diagnose.coordination.proofs import Proofs
from probing.daemon.diagnose.coordination.sight import LocalSights
from probing.daemon.diagnose.findings_store import FindingsStore
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.diagnose.hooks import Hooks
from probing.daemon.diagnose.watch import JobWatch
from probing.daemon.ipc import Header
from probing.daemon.query.caller import Caller
from probing.daemon.query.engine import Engine
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.received_findings import ReceivedFindings
from probing.daemon.source_state import SourceState, first_of
from probing.diagnosis.facts import Missing

__all__ = ("Diagnosis",)


@dataclass(frozen=True, slots=True)
class _Started:
    hooks: Hooks
    watch: JobWatch
    coordinator: Coordinator
    received: ReceivedFindings


class Diagnosis:
    """The diagnosis of jobs. ``gatherer`` gathers the facts of jobs, also for requests of clients. ``start`` starts the
    watch.

    ``certified`` returns whether a certificate proves the name of a node. ``stored`` is called with each row of
    ``diagnosis.findings`` after it was stored, and with the owner of its job (``JobWatch.owner_of``). ``absences``: see
    ``Gatherer``.
    """

    def __init__(
        self,
        config: Config,
        collector: CollectorClient,
        engine: Engine,
        peers: Peers,
        certified: Callable[[str], bool] = lambda _: False,
        stored: Callable[[Mapping[str, Any], Hashable], None] = lambda _row, _owner: None,
        absences: Callable[[str], Sequence[Missing]] = lambda _: (),
    ) -> None:
        self._certified = certified
        self._stored = stored
        self._node, self._options, self._peers = config.node_name, config.diagnose, peers
        # The interval at which sockets are read, s. The processes that hold the sockets are read at least at every
        # second reading of the sockets.
        self._look_s = max(config.diagnose.stall_s, config.net.tcp_interval_s)
        self._grace_s, self._trusted = max(15.0, 3 * config.net.tcp_interval_s), config.cluster.trust_claims
        self._hook_socket = f"{config.runtime_dir}/hook.sock"
        self._collector, self._engine = collector, engine
        self.gatherer = Gatherer(
            self._node,
            engine,
            collector,
            stall_s=config.diagnose.stall_s,
            phase_limits=config.diagnose.phase_limits,
            absences=absences,
        )
        self.sights = LocalSights(collector)
        self._started: _Started | None = None

    def start(self) -> None:
        if not self._options.enabled:
            return
        hooks = Hooks(self._hook_socket, self._node, self._options, lambda job, run: watch.owner_of(job, run))
        proofs = Proofs(self._node, self._peers, self.sights, grace_s=self._grace_s, trusted=self._trusted)
        jobs = JobFacts(self._node, self.gatherer, proofs)

        def stored(row: Mapping[str, Any]) -> None:
            self._stored(row, watch.owner_of(str(row["job"]), str(row["run"])))

        store = FindingsStore(self._collector, self._engine, self._node, stored)
        coordinator = Coordinator(self._node, proofs, look_s=self._look_s)
        watch = JobWatch(self._node, self._options, store, jobs, hooks.post, coordinator)
        received = ReceivedFindings(self._node, watch, proofs, coordinator.taken, self._certified)
        self._started = _Started(hooks, watch, coordinator, received)
        hooks.start()
        coordinator.start()
        watch.start()

    def stop(self) -> None:
        if self._started is not None:
            self._started.coordinator.stop()
            self._started.watch.stop()

    def take(self, findings: bytes, caller: Caller) -> int:
        """Stores findings of another node, the caller. Returns the number of stored findings. Raises ProbingError."""
        return self._started.received.take(findings, caller) if self._started is not None else 0

    def sight(self, job: str, run: str) -> Sight:
        """Returns the addresses to which the ranks of a run on this node are connected."""
        return self.sights.sight(job, run)

    def sources(self) -> list[SourceState]:
        """Returns the row of the watch for ``status`` and ``probing.sources``; empty if diagnosis is disabled."""
        if not self._options.enabled:
            return []
        if self._started is None:
            return [SourceState("diagnose", "running", detail="starts")]
        hooks, found, received = self._started.hooks, self._started.watch.state(), self._started.received
        problems = [*self._started.coordinator.problems, *received.problems]
        reasons = [*filter(None, [found.reason]), *hooks.problems, *problems]
        detail = "; ".join(filter(None, [found.detail, hooks.detail, received.detail]))
        state = "degraded" if reasons else found.state
        return [found._replace(state=state, reason=first_of(reasons), detail=detail)]

    @property
    def hooks(self) -> dict[str, int]:
        """Returns the number of hooks by outcome; empty if no hook is configured."""
        return self._started.hooks.counts if self._started is not None else {}

    def among(self, status: Mapping[str, Any]) -> Header:
        """Returns the collector's ``status`` with the row of the watch added to its sources."""
        return {**status, "sources": [*status.get("sources", ()), *(state._asdict() for state in self.sources())]}
