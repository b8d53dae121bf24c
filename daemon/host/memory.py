"""The source of process.memory: the memory of trainers and data loaders, read every ``host.memory_interval_s``."""

from __future__ import annotations

from collections.abc import Callable

from probing.api.errors import ProbingError
from probing.api.tables.process import MEMORY
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("ProcessMemorySource",)

TIMEOUT_S = 0.5
MAX_PROCESSES = 1_024
_ROLES = ("trainer", "data_loader")


class ProcessMemorySource(Source):
    """Reads the memory of processes, all with one request to a reader: a tick costs 0.1 ms for each process."""

    name = "memory"
    table = MEMORY.name

    def __init__(
        self, readers: ReaderPool, processes: Discovery, sink: Sink, clock: Clock, node: str, interval_s: float
    ) -> None:
        self._readers, self._processes, self._sink = readers, processes, sink
        self._clock, self._node, self._interval_s = clock, node, interval_s
        self._reason = ""

    @classmethod
    def make(cls, context: Context) -> ProcessMemorySource:
        interval_s = context.config.host.memory_interval_s
        return cls(context.readers, context.processes, context.sink, context.clock, context.node, interval_s)

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s

    def tick(self) -> None:
        live = [who for who in self._processes.live() if who.role in _ROLES]
        watched = live[:MAX_PROCESSES]
        if not watched:
            return
        targets = [list(who.key) for who in watched]
        try:
            answer = self._readers.call("state", timeout=TIMEOUT_S, targets=targets, memory=True)
            states = payload_of(list[Row | None], answer)
        except ProbingError as e:
            self._reason = e.message
            return
        left_out = len(live) - len(watched)
        self._reason = f"{left_out} processes are not read: more than {MAX_PROCESSES} run" if left_out else ""
        common = {"node": self._node, "ts": self._clock.pair().real_ns}
        rows = [
            {**who._asdict(), **seen, **common}
            for who, seen in zip(watched, states, strict=True)
            if seen and seen["rss_bytes"] is not None
        ]
        if rows:
            self._sink.put(self.table, batch_of(self.table, rows))

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self._reason)]
