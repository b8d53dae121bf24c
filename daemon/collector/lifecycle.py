"""The source of processes: hands events of the kernel to discovery, and new mappings to the watch of libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.clock import ClockPair
from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.collector.libraries.young import YoungProcesses
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.pace import Pace
from probing.daemon.processes.quarantine import Quarantine
from probing.daemon.source import Identity, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("Events", "Lifecycle")

FORK, EXEC, EXIT, OOM = 1, 2, 3, 4
# Between two scans of all processes where the kernel does not report new mappings: old processes load libraries too.
SCAN_S = 30.0


class Events(Protocol):
    """``processes.discovery.Discovery``: none of these blocks. Times are CLOCK_MONOTONIC ns."""

    def on_fork(self, tgid: int, start_ns: int, ktime: int, ppid: int) -> None: ...

    def on_exec(self, tgid: int, start_ns: int, ktime: int) -> None: ...

    def on_exit(self, tgid: int, start_ns: int, ktime: int, status: int | None = None) -> None: ...

    def on_oom(self, tgid: int, start_ns: int, ktime: int) -> None: ...

    def on_mapping(self, pid: int) -> None: ...

    def rows(self, pair: ClockPair) -> pa.RecordBatch: ...

    def envs(self, pair: ClockPair) -> pa.RecordBatch: ...


class Lifecycle(Source):
    """``mappings`` is None where the kernel refuses to report new mappings: then young processes are polled.

    ``quarantined`` returns the processes that are not read for a while, since a read of them did not end.
    """

    name = "processes"
    table = "process.events"
    objects: ClassVar[tuple[str, ...]] = ("lifecycle",)

    def __init__(
        self,
        events: Events,
        mappings: MmapWatch | None,
        libraries: LibraryWatch,
        settings: Changes,
        quarantined: Callable[[], list[Quarantine]],
    ) -> None:
        self._events = events
        self._mappings = mappings
        self._libraries = libraries
        self._settings = settings
        self._quarantined = quarantined
        self._lost = 0
        self._young = YoungProcesses()
        self._scanned = time.monotonic()
        self._pace = Pace()

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {"lifecycle": RingConsumer(self.assemble, self.table)}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"process.processes": self._events.rows, "process.envs": self._events.envs}

    def process_exited(self, process: Identity) -> None:
        self._settings.forget(process.pid, process.start_ns)

    def states(self, totals: Totals) -> list[SourceState]:
        silent = [f"process {q.pid} does not let itself be read ({q.op})" for q in self._quarantined()]
        if self._mappings is None:
            silent.append("new mappings are found by polling: kernel.perf_event_paranoid is above 2")
        return [totals.of(self.name, self.table, "lifecycle", reason=first_of(silent))]

    def assemble(self, records: npt.NDArray[Any], _: ClockPair) -> Mapping[str, pa.RecordBatch]:
        """Hand over records of the ring ``lifecycle``. Discovery puts the rows, once a process is identified."""
        fields = ("type", "tgid", "start_ns", "ktime", "ppid", "exit_code")
        for kind, tgid, start_ns, ktime, ppid, status in zip(*(records[f].tolist() for f in fields), strict=True):
            if kind == FORK:
                self._events.on_fork(tgid, start_ns, ktime, ppid)
            elif kind == EXEC:
                self._events.on_exec(tgid, start_ns, ktime)
                self._libraries.changed(tgid)
                self._young.add(tgid)
            elif kind == EXIT:
                self._events.on_exit(tgid, start_ns, ktime, status)
                self._libraries.changed(tgid)
                self._young.remove(tgid)
            elif kind == OOM:
                self._events.on_oom(tgid, start_ns, ktime)
        return {}

    def read_mappings(self) -> None:
        """Called often, by one thread."""
        pids = self._polled() if self._mappings is None else self._reported(self._mappings)
        for pid in pids:
            self._libraries.seen(pid)
        for pid in self._pace.passing(pids):
            self._events.on_mapping(pid)

    def _reported(self, mappings: MmapWatch) -> set[int]:
        pids = {mapping.pid for mapping in mappings.read()}
        if mappings.lost != self._lost:
            self._lost = mappings.lost
            self._libraries.scan()
        return pids

    def _polled(self) -> set[int]:
        now = time.monotonic()
        if now - self._scanned >= SCAN_S:
            self._scanned = now
            self._libraries.scan()
        return set(self._young.due())
