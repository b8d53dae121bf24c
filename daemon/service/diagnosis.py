"""The diagnosis of jobs in the service: the watch that runs all the time, with its store, gatherer and hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from probing.daemon.config import Config
from probing.daemon.diagnose.coordination.coordinator import Coordinator
from probing.daemon.diagnose.coordination.job_facts import JobFacts
from probing.daemon.diagnose.coordination.peers import Peers
from probing.daemon.diagnose.findings_store import FindingsStore
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.diagnose.hooks import Hooks
from probing.daemon.diagnose.watch import JobWatch
from probing.daemon.query.engine import Engine
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.service.received_findings import take_findings
from probing.daemon.source_state import SourceState, first_of

__all__ = ("Diagnosis",)


class Diagnosis:
    """``gatherer`` makes the facts of jobs, also for requests of clients."""

    def __init__(self, config: Config, collector: CollectorClient, engine: Engine, peers: Peers) -> None:
        options, node = config.diagnose, config.node_name
        self.gatherer = Gatherer(node, engine, collector, stall_s=options.stall_s)
        self._enabled = options.enabled
        self._hooks = Hooks(f"{config.runtime_dir}/hook.sock", config.node_name, options)
        self._coordinator = Coordinator(node, peers)
        self._jobs = JobFacts(node, self.gatherer, peers)
        store = FindingsStore(collector, engine)
        self._watch = JobWatch(node, options, store, self._jobs, self._hooks.post, self._coordinator)

    def start(self) -> None:
        if self._enabled:
            self._hooks.start()
            self._coordinator.start()
            self._watch.start()

    def stop(self) -> None:
        self._coordinator.stop()
        self._watch.stop()
        self._jobs.close()

    def take(self, findings: bytes) -> int:
        """Takes findings of another node. Returns how many. Raises FormatError and UsageError."""
        return take_findings(self._watch, findings) if self._enabled else 0

    def sources(self) -> list[SourceState]:
        """Returns the row of the watch in ``status`` and ``probing.sources``; none where it is switched off."""
        if not self._enabled:
            return []
        found = self._watch.state()
        reasons = [*filter(None, [found.reason]), *self._hooks.problems, *self._coordinator.problems]
        detail = "; ".join(filter(None, [found.detail, self._hooks.detail]))
        state = "degraded" if reasons else found.state
        return [replace(found, state=state, reason=first_of(reasons), detail=detail)]

    def among(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the collector's ``status`` with the row of the watch among its sources."""
        return {**status, "sources": [*status.get("sources", ()), *(state.to_dict() for state in self.sources())]}
