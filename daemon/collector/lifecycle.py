"""Processes that start and end, and libraries that they map, handed on as the kernel tells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.clock import ClockPair
from probing.daemon.collector.libraries import LibraryWatch

__all__ = ("Lifecycle",)

FORK, EXEC, EXIT = 1, 2, 3


class Listener(Protocol):
    """``processes.discovery.Discovery``: none of these may block."""

    def on_fork(self, pid: int, start_ns: int, ppid: int, ts_ns: int) -> None: ...

    def on_exec(self, pid: int, start_ns: int, ppid: int, ts_ns: int) -> None: ...

    def on_exit(self, pid: int, start_ns: int, exit_code: int, ts_ns: int) -> None: ...

    def on_mapping(self, pid: int) -> None: ...


class Lifecycle:
    def __init__(self, listener: Listener, mappings: MmapWatch, libraries: LibraryWatch) -> None:
        self._listener = listener
        self._mappings = mappings
        self._libraries = libraries
        self._lost = 0

    def assemble(self, records: npt.NDArray[np.void], pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
        """Records of the ring ``lifecycle``. The rows come from the listener, once it knows who it is."""
        shift = pair.mono_to_utc_ns
        tell: dict[int, Callable[..., None]] = {FORK: self._listener.on_fork, EXEC: self._listener.on_exec}
        fields = ("type", "tgid", "start_ns", "ppid", "exit_code", "ktime")
        for kind, pid, start_ns, ppid, code, ktime in zip(*(records[f].tolist() for f in fields), strict=True):
            if kind == EXIT:
                self._listener.on_exit(pid, start_ns, code, ktime + shift)
            elif kind in tell:
                tell[kind](pid, start_ns, ppid, ktime + shift)
        return {}

    def read_mappings(self) -> None:
        """Called with each cycle."""
        for pid in {mapping.pid for mapping in self._mappings.read()}:
            self._libraries.seen(pid)
            self._listener.on_mapping(pid)
        if self._mappings.lost != self._lost:
            self._lost = self._mappings.lost
            for path in Path("/proc").iterdir():
                if path.name.isdigit():
                    self._libraries.seen(int(path.name))
