"""Sources that do nothing unless somebody asks for them: lines that trainers write, and probes that users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.probe_slots import ProbeSlot
from probing.daemon.clock import ClockPair
from probing.daemon.collector.context import Shared
from probing.daemon.collector.status import SourceState
from probing.daemon.collector.symbols import symbols_by
from probing.daemon.logs.source import OBJECTS, RING, LogSource
from probing.daemon.processes.discovery import Discovery
from probing.daemon.source import Identity
from probing.daemon.user_probes.manager import UserProbes
from probing.daemon.user_probes.tables import UserTables

__all__ = ("OBJECTS", "OptionalSources")

USERS_S, IDLE_S = 0.1, 1.0
_LOGS = "process.logs"
_Assemble = Callable[[npt.NDArray[Any], ClockPair], Mapping[str, pa.RecordBatch]]


class OptionalSources:
    """Also a ``processes.announce.Listener``."""

    def __init__(self, shared: Shared, processes: Discovery, tables: UserTables) -> None:
        session, readers, outbox, clock, node = (
            shared.session, shared.readers, shared.outbox, shared.clock, shared.node,
        )  # fmt: skip
        symbols = symbols_by(shared.parsers.stacks)
        config, changes = shared.config, shared.changes
        self._refused = session.refused.get(OBJECTS[0])
        self._logs: LogSource | None = None
        if self._refused is None:
            self._logs = LogSource(
                session, processes, readers, symbols, outbox, clock, node, config.logs,
                enabled=lambda who: bool(changes.value("logs.enabled", who)), fuse=config.probes.fuse,
            )  # fmt: skip
            changes.listeners.append(self._logs.settings_changed)
        self._probes = UserProbes(
            Path(config.probes.user_dir), tables, outbox, processes, readers, symbols, node, clock,
            multi=session.features.uprobe_multi, fuse=config.probes.fuse,
        )  # fmt: skip

    @property
    def slots(self) -> dict[int, ProbeSlot]:
        named = {} if self._logs is None else self._logs.slots
        return {slot: ProbeSlot(name, LogSource.name, _LOGS) for slot, name in named.items()}

    @property
    def assemble(self) -> dict[str, _Assemble]:
        """By ring."""
        return {} if self._logs is None else {RING: self._logs.assemble}

    def start(self) -> None:
        if self._logs is not None:
            self._logs.start()
        self._probes.start()

    def close(self) -> None:
        self._probes.stop()
        if self._logs is not None:
            self._logs.stop()

    def pause(self, paused: bool) -> None:
        """Probes of users have no switch in the kernel: they are taken off."""
        self._probes.pause(paused)

    def tick_s(self) -> float:
        """When ``tick`` is due, s: often while there are probes of users, whose rings it reads."""
        return USERS_S if self._probes.loaded else IDLE_S

    def tick(self) -> None:
        self._probes.drain()

    def states(self, state: str, rows: Mapping[str, int], lost: Mapping[str, int]) -> list[SourceState]:
        users = [
            SourceState(p.name, p.state, p.reason, rows[p.table], p.lost, p.detail) for p in self._probes.states()
        ]
        return [self._log_state(state, rows[_LOGS], lost[LogSource.name]), *users]

    def _log_state(self, state: str, rows: int, lost: int) -> SourceState:
        if self._logs is None:
            reason = self._refused.message if self._refused else ""
            return SourceState(LogSource.name, "degraded", reason)
        watched = self._logs.watched
        reason = self._logs.reason
        detail = f"{watched} processes"
        return SourceState(LogSource.name, state if watched or reason else "stopped", reason, rows, lost, detail)

    # What processes do.

    def process_identified(self, who: Identity) -> None:
        self._probes.process_identified(who)
        if self._logs is not None:
            self._logs.process_identified(who)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self._probes.process_replaced(pid, start_ns)
        if self._logs is not None:
            self._logs.process_replaced(pid, start_ns)

    def process_exited(self, who: Identity) -> None:
        self._probes.process_exited(who)
        if self._logs is not None:
            self._logs.process_exited(who)
