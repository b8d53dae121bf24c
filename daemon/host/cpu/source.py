"""The source of cpu.utilization and cpu.tasks: one request a second to a reader for all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables.cpu import TASKS, UTILIZATION
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.host.cpu.ledger import Ledger, rows_of
from probing.daemon.host.cpu.selection import ROLES, Selection
from probing.daemon.host.cpu.tasks import Tasks
from probing.daemon.host.cpu.usage import Usage
from probing.daemon.host.patience import Patience
from probing.daemon.processes.readers import Readers
from probing.daemon.source import Identity, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("CpuSource",)

TIMEOUT_S = 1.0
# A node with more watched processes is read less often, so that the cost stays.
_FOR_ONE_INTERVAL = 256


class _Live(Protocol):
    """``processes.discovery.Discovery``."""

    def live(self) -> list[Identity]: ...


class CpuSource(Source):
    """``interval_s``: between two looks, for up to 256 watched processes."""

    name = "cpu"
    table = UTILIZATION.name

    def __init__(
        self, readers: Readers, processes: _Live, sink: Sink, clock: Clock, node: str, interval_s: float
    ) -> None:
        self._readers, self._processes, self._sink = readers, processes, sink
        self._clock, self._node, self._interval_s = clock, node, interval_s
        self._selection, self._ledger = Selection(), Ledger()
        self._tasks = Tasks(readers, processes, node)
        self._watched = 0
        self._patience = Patience()

    @classmethod
    def make(cls, context: Context) -> CpuSource:
        interval_s = context.config.host.cpu_interval_s
        return cls(context.readers, context.processes, context.sink, context.clock, context.node, interval_s)

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s * max(1.0, self._watched / _FOR_ONE_INTERVAL) * self._patience.factor

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {TASKS.name: self._tasks.batch}

    def stop(self) -> None:
        self._tasks.stop()

    def tick(self) -> None:
        live = [who for who in self._processes.live() if who.role in ROLES]
        self._watched = len(live)
        if not live:
            return  # nothing trains: nobody asks who competes
        request = self._selection.request(live)
        if not request:
            return
        try:
            answer = self._readers.call("usage", timeout=TIMEOUT_S, timeout_ms=int(TIMEOUT_S * 500), **request)
        except ProbingError as e:
            self._patience.failed(e.message)
            return
        left = self._selection.left_out
        self._patience.answered(f"{left} processes are not read: there are too many" if left else "")
        rows = rows_of(answer.payload)
        usage = Usage(rows, self._ledger.exchange(rows))
        header = answer.header
        self._selection.listed(header.get("pids", ()), header.get("threads", {}))
        self._selection.counted(usage.thread_counts())
        batch = usage.batch(self._node, self._clock.pair(), self._selection, header.get("texts", ()))
        self._selection.busiest(usage.threads(), usage.shares())
        if batch is not None:
            self._sink.put(self.table, batch)

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self._patience.reason)]
