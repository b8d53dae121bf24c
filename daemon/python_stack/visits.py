"""The base of sources that read each trainer periodically, through readers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from probing.api.errors import ProbingError
from probing.daemon.fairness import FairExecutor
from probing.daemon.processes.discovery import Discovery
from probing.daemon.source import Identity, ProcessKey, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.worker import Worker

__all__ = ("TIMEOUT_S", "TrainerVisits")

PARALLEL = 4
# The maximum time for reading a process, s. A read that takes longer fails, and the next visit tries again.
TIMEOUT_S = 1.0
_log = logging.getLogger(__name__)
_State = TypeVar("_State")


@dataclass(slots=True)
class _Visited(Generic[_State]):
    """A trainer. ``state``: the state that the source keeps for the trainer; ``reading``: the trainer's last read."""

    who: Identity
    state: _State
    reason: str = ""
    reading: Future[None] | None = None


class TrainerVisits(Source, ABC, Generic[_State]):
    """Visits trainers. ``interval_s`` returns the pause between two rounds, s; ``aligned``: see ``Worker``.

    Each process is read separately, at most ``PARALLEL`` at once, and the owners take turns. Processes that do not
    answer delay processes of other owners only if no thread is left, and by at most one timeout.
    """

    def __init__(self, processes: Discovery, interval_s: Callable[[], float], *, aligned: bool = True) -> None:
        self._processes = processes
        self._visited: dict[ProcessKey, _Visited[_State]] = {}
        self._pool = FairExecutor(PARALLEL, self.name)
        patience_s = TIMEOUT_S + 1.0
        self._worker = Worker(self.name, self.look, interval_s, patience_s=patience_s, aligned=aligned)

    @abstractmethod
    def wanted(self, who: Identity) -> bool:
        """Returns whether to read a trainer now."""

    @abstractmethod
    def new_state(self) -> _State:
        """Returns the state of a trainer before its first visit."""

    @abstractmethod
    def visit(self, who: Identity, state: _State) -> None:
        """Reads a trainer, in a thread of the pool. Raises ProbingError if it cannot be read."""

    def left(self, who: Identity, state: _State) -> None:
        """Called when a trainer has ended, or is no longer wanted."""

    def look(self) -> list[Future[None]]:
        """Starts to read all wanted trainers, except those that are still being read."""
        live = {who.key: who for who in self._processes.live() if who.role == "trainer" and self.wanted(who)}
        for key in self._visited.keys() - live.keys():
            visited = self._visited.pop(key)
            self.left(visited.who, visited.state)
        begun = []
        for key, who in live.items():
            if key not in self._visited:
                self._visited[key] = _Visited(who, self.new_state())
            visited = self._visited[key]
            visited.who = who
            if visited.reading is None or visited.reading.done():
                visited.reading = self._pool.submit(who.owner, self._visit, who, visited)
                begun.append(visited.reading)
        return begun

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Stops the visits; reads in progress end at their own deadlines."""
        self._worker.stop()
        self._pool.stop(wait=False)

    def settings_changed(self) -> bool:
        """Starts a round at once, because other trainers may be wanted now. Returns False."""
        self._worker.wake()
        return False

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self.reason)]

    @property
    def reason(self) -> str:
        """Why a trainer could not be read at the last try; empty when no read failed."""
        return next((visited.reason for visited in list(self._visited.values()) if visited.reason), "")

    def _visit(self, who: Identity, visited: _Visited[_State]) -> None:
        try:
            self.visit(who, visited.state)
        except ProbingError as e:
            if visited.reason != e.message:
                _log.warning("%s: process %d cannot be read: %s", self.name, who.pid, e.message)
            visited.reason = e.message
        except Exception as e:  # nobody reads the result of the future, so the error would stay unseen
            _log.exception("%s: the visit of process %d failed", self.name, who.pid)
            visited.reason = f"the visit of a process failed: {type(e).__name__}"
        else:
            visited.reason = ""
