"""The toy source: the load of the node. An example of a source without BPF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.source import Sink, Source
from toy_source.tables import LOAD, LOAD_NOW

__all__ = ("LoadSource",)


class LoadSource(Source):
    """``file`` has the form of /proc/loadavg (proc(5))."""

    name = "load"
    table = LOAD.name

    def __init__(self, sink: Sink, clock: Clock, node: str, file: Path = Path("/proc/loadavg")) -> None:
        self._sink = sink
        self._clock = clock
        self._node = node
        self._file = file

    @classmethod
    def make(cls, context: Context) -> LoadSource:
        return cls(context.sink, context.clock, context.node)

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {LOAD_NOW.name: lambda pair: self._read(LOAD_NOW.name, pair)}

    def tick(self) -> None:
        self._sink.put(LOAD.name, self._read(LOAD.name, self._clock.pair()))

    def _read(self, table: str, pair: ClockPair) -> pa.RecordBatch:
        load_1m, _, _, threads, _ = self._file.read_text().split()
        running = int(threads.partition("/")[0])
        row = {"node": self._node, "ts": pair.real_ns, "load_1m": float(load_1m), "running": running}
        return batch_of(table, [row])
