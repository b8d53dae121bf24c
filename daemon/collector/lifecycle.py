"""Processes that start and end, and libraries that they map, handed on as the kernel tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.clock import ClockPair
from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.collector.pace import Pace

__all__ = ("Events", "Lifecycle")

FORK, EXEC, EXIT, OOM = 1, 2, 3, 4


class Events(Protocol):
    """``processes.discovery.Discovery``: none of these blocks. Times are CLOCK_MONOTONIC ns."""

    def on_fork(self, tgid: int, start_ns: int, ktime: int, ppid: int) -> None: ...

    def on_exec(self, tgid: int, start_ns: int, ktime: int) -> None: ...

    def on_exit(self, tgid: int, start_ns: int, ktime: int, status: int | None = None) -> None: ...

    def on_oom(self, tgid: int, start_ns: int, ktime: int) -> None: ...

    def on_mapping(self, pid: int) -> None: ...


class Lifecycle:
    def __init__(self, events: Events, mappings: MmapWatch, libraries: LibraryWatch) -> None:
        self._events = events
        self._mappings = mappings
        self._libraries = libraries
        self._lost = 0
        self._pace = Pace()

    def assemble(self, records: npt.NDArray[Any], _: ClockPair) -> Mapping[str, pa.RecordBatch]:
        """Records of the ring ``lifecycle``. The rows come from Discovery, once they know who it is."""
        fields = ("type", "tgid", "start_ns", "ktime", "ppid", "exit_code")
        for kind, tgid, start_ns, ktime, ppid, status in zip(*(records[f].tolist() for f in fields), strict=True):
            if kind == FORK:
                self._events.on_fork(tgid, start_ns, ktime, ppid)
            elif kind == EXEC:
                self._events.on_exec(tgid, start_ns, ktime)
                self._libraries.changed(tgid)
            elif kind == EXIT:
                self._events.on_exit(tgid, start_ns, ktime, status)
            elif kind == OOM:
                self._events.on_oom(tgid, start_ns, ktime)
                self._libraries.changed(tgid)
        return {}

    def read_mappings(self) -> None:
        """Often, by one thread."""
        pids = {mapping.pid for mapping in self._mappings.read()}
        for pid in pids:
            self._libraries.seen(pid)
        for pid in self._pace.passing(pids):
            self._events.on_mapping(pid)
        if self._mappings.lost != self._lost:
            self._lost = self._mappings.lost
            self._libraries.scan()
