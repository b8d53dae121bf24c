"""Publishes start, identity and exit of processes to ``process.events`` and listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.processes.registry import Process
from probing.daemon.processes.rows import detail_of, event_row
from probing.daemon.source import Sink, Source

__all__ = ("Announcer",)

_log = logging.getLogger(__name__)


class Announcer:
    """Announces processes: puts rows of process.events into the sink, and calls ``listeners``."""

    def __init__(self, sink: Sink, clock: Clock, node: str) -> None:
        self._sink = sink
        self._clock = clock
        self._node = node
        self.listeners: list[Source] = []

    def identified(self, processes: Iterable[Process]) -> None:
        """Publishes start and identity of each process, unless they were published already."""
        pair = self._clock.pair()
        identified = list(processes)
        rows = []
        for process in identified:
            if not process.started:
                started_ns = process.facts.start_ns + pair.boot_to_utc_ns
                rows.append(event_row(self._node, started_ns, "start", process))
            if not process.published:
                detail = detail_of(process, self._clock.boot_id)
                rows.append(event_row(self._node, pair.real_ns, "identified", process, detail=detail))
            process.started = process.published = True
        if rows:
            self._sink.put("process.events", batch_of("process.events", rows))
        for process in identified:
            self._notify(lambda listener: listener.process_identified, process.identity)

    def out_of_memory(self, process: Process, mono_ns: int) -> None:
        """Publishes that the kernel kills a process for lack of memory; its exit is published later."""
        ts_ns = mono_ns + self._clock.pair().mono_to_utc_ns
        row = event_row(self._node, ts_ns, "oom_kill", process)
        self._sink.put("process.events", batch_of("process.events", [row]))

    def exited(self, process: Process, status: int | None, mono_ns: int | None) -> None:
        """Publishes an exit. ``status``: the status that waitpid(2) returns, None if unknown. ``mono_ns``: the time of
        the exit, None for now.
        """
        pair = self._clock.pair()
        ts_ns = pair.real_ns if mono_ns is None else mono_ns + pair.mono_to_utc_ns
        signal = status & 0x7F if status is not None else None
        code = (status >> 8) & 0xFF if status is not None and not signal else None
        row = event_row(self._node, ts_ns, "exit", process, exit_code=code, signal=signal or None)
        self._sink.put("process.events", batch_of("process.events", [row]))
        self._notify(lambda listener: listener.process_exited, process.identity)

    def replaced(self, pid: int, start_ns: int, mono_ns: int) -> None:
        self._notify(lambda listener: listener.process_replaced, pid, start_ns)
        self._notify(lambda listener: listener.program_ended, pid, start_ns, mono_ns)

    def _notify(self, method: Callable[[Source], Callable[..., None]], *values: Any) -> None:
        for listener in self.listeners:
            try:
                method(listener)(*values)
            except Exception:  # the other sources must still get the event, which is announced only once
                _log.exception("the source %s failed to follow a process", listener.name)
