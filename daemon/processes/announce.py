"""Telling the log and the other sources who came, who it is, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.processes.registry import Process
from probing.daemon.processes.rows import detail_of, event_row
from probing.daemon.source import Identity, Sink

__all__ = ("Announcer", "Listener")


class Listener(Protocol):
    """Another source that follows processes. Called from the thread of discovery; must not block."""

    def process_identified(self, who: Identity) -> None:
        """New, or somebody else than before."""

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """It called exec and runs another program now."""

    def process_exited(self, who: Identity) -> None: ...


class Announcer:
    """Rows of process.events to the sink, and calls to ``listeners``."""

    def __init__(self, sink: Sink, clock: Clock, node: str) -> None:
        self._sink = sink
        self._clock = clock
        self._node = node
        self.listeners: list[Listener] = []

    def identified(self, processes: Iterable[Process]) -> None:
        """Rows of a start and of who it is now, where they were not made yet."""
        pair = self._clock.pair()
        told = list(processes)
        rows = []
        for process in told:
            if not process.started:
                started_ns = process.facts.start_ns + pair.boot_to_utc_ns
                rows.append(event_row(self._node, started_ns, "start", process))
            if not process.told:
                detail = detail_of(process, self._clock.boot_id)
                rows.append(event_row(self._node, pair.real_ns, "identified", process, detail=detail))
            process.started = process.told = True
        if rows:
            self._sink.put("process.events", batch_of("process.events", rows))
        for process in told:
            for listener in self.listeners:
                listener.process_identified(process.identity)

    def out_of_memory(self, process: Process, mono_ns: int) -> None:
        """A row of a kill for lack of memory; that of the exit follows."""
        ts_ns = mono_ns + self._clock.pair().mono_to_utc_ns
        row = event_row(self._node, ts_ns, "oom_kill", process)
        self._sink.put("process.events", batch_of("process.events", [row]))

    def exited(self, process: Process, status: int | None, mono_ns: int | None) -> None:
        """``status`` as waitpid(2) gives it and when it ended; None: not known, and now."""
        pair = self._clock.pair()
        ts_ns = pair.real_ns if mono_ns is None else mono_ns + pair.mono_to_utc_ns
        signal = status & 0x7F if status is not None else None
        code = (status >> 8) & 0xFF if status is not None and not signal else None
        row = event_row(self._node, ts_ns, "exit", process, exit_code=code, signal=signal or None)
        self._sink.put("process.events", batch_of("process.events", [row]))
        for listener in self.listeners:
            listener.process_exited(process.identity)

    def replaced(self, pid: int, start_ns: int) -> None:
        for listener in self.listeners:
            listener.process_replaced(pid, start_ns)
