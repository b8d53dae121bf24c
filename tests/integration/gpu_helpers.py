"""What the tests of GPUs share: a source over a real process, and the rows that it puts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from doubles.nvml_double import NvmlDouble
from processes_helpers import Listener
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.config import Config
from probing.daemon.gpu.nvml.session import NvmlSession
from probing.daemon.gpu.nvml.source import NvmlSource
from probing.daemon.source import Identity, Loss
from probing.daemon.source_state import SourceState, Totals

__all__ = ("Gpus", "Rows", "Watched", "gpus", "plain")

MODULE = "probing.daemon.confined.nvml"


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its times as integers."""
    kinds = [pa.int64() if pa.types.is_timestamp(field.type) else field.type for field in batch.schema]
    arrays = [column.cast(kind) for column, kind in zip(batch.columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


class Rows:
    """A sink."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        # Times as ns: datetime has no more than microseconds.
        self.tables[table] += plain(batch).to_pylist()

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)


class Watched:
    """Processes that are watched, with their environments."""

    def __init__(self) -> None:
        self.processes: dict[Identity, Mapping[str, str]] = {}

    def live(self) -> list[Identity]:
        return list(self.processes)

    def environ(self, pid: int, start_ns: int) -> Mapping[str, str]:
        return next(environ for who, environ in self.processes.items() if who.key == (pid, start_ns))

    def add(self, pid: int, rank: int | None, role: str = "trainer", **environ: str) -> None:
        who = Identity(pid, pid * 10, "job", "run", role, rank, rank, 8, 0)
        self.processes[who] = environ


class Gpus:
    """A driver (``double``) and the source that reads it. ``tick`` is one turn of its ticker."""

    def __init__(
        self, double: NvmlDouble, listener: Listener, source: NvmlSource, rows: Rows, watched: Watched
    ) -> None:
        self.double, self.source, self.sink, self.watched = double, source, rows, watched
        self.listener = listener

    def tick(self) -> None:
        self.source.tick()

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.sink.tables[f"gpu.{table}"]

    def fresh(self, table: str = "utilization", *, turns: int = 1) -> list[dict[str, Any]]:
        """Ticks until so many more readings have come, and returns the rows of the last one."""
        for _ in range(turns):
            until(partial(self._grown, len(self.rows("utilization"))), what=lambda: str(self.state()))
        last = self.rows(table)[-1]["ts"] if self.rows(table) else None
        return [row for row in self.rows(table) if row["ts"] == last]

    def _grown(self, before: int) -> bool:
        self.tick()
        return len(self.rows("utilization")) > before

    def events(self) -> list[tuple[str, int | None]]:
        return [(row["event"], row["device_id"]) for row in self.rows("events")]

    def event(self, name: str) -> dict[str, Any]:
        """Ticks until there is an event of this name, and returns the first one."""

        def found() -> list[dict[str, Any]]:
            self.tick()
            return [row for row in self.rows("events") if row["event"] == name]

        return until(found, what=f"an event {name} among {self.events()}")[0]

    def devices(self) -> list[dict[str, Any]]:
        return plain(self.source.live_tables["gpu.devices"](SystemClock().pair())).to_pylist()

    def state(self) -> SourceState:
        (state,) = self.source.states(Totals("running", {}, {}))
        return state

    def close(self) -> None:
        self.source.stop()
        self.listener.close()


def gpus(library: Path, folder: Path, values: Mapping[str, int | float | str], *options: str) -> Gpus:
    """``options`` are those of probingd's command line."""
    double = NvmlDouble(library, values)
    # Short sysfs: that of this machine has other devices.
    common = (f"--gpu.library={library}", f"--gpu.sysfs={folder}/sys", "--gpu.interval_s=0.1", *options)
    socket = folder / "nvml.sock"
    listener = Listener(socket, MODULE, arguments=common)
    rows, watched = Rows(), Watched()
    session = NvmlSession(str(socket), retry_s=(0.05,))
    source = NvmlSource(session, watched, rows, SystemClock(), "node", Config.from_args(list(common)).gpu)
    return Gpus(double, listener, source, rows, watched)
