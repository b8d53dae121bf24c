"""The sources of host.memory, host.disk, host.pressure and host.file_systems, which send requests to a reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from probing.api.errors import ProbingError, TargetTimeout
from probing.api.tables.host import DISK, FILE_SYSTEMS, MEMORY, PRESSURE
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.backoff import Patience
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.host.node.rows import NodeRows
from probing.daemon.ipc import Header
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("NodeSource", "SpaceSource")

TIMEOUT_S = 1.0
# The interval at which file systems are read, and the time from the start to the first reading, s. The first reading
# comes early, so that callers need not wait for it.
SPACE_INTERVAL_S, FIRST_SPACE_S = 30.0, 2.0
# A request to a file system that does not answer blocks a reader. So after two timeouts in a row, the file system is
# asked again only FIRST_TURNS readings later. Each further timeout doubles this number, up to SILENT_TURNS.
FIRST_TURNS, SILENT_TURNS = 4, 120
MAX_WATCHED = 1_024
_ROLES = ("trainer", "data_loader", "launcher")


class _HostSource(Source):
    """A source that asks a reader, adds ``node`` and ``ts`` to its rows, and reports why a reader did not answer."""

    def __init__(
        self, readers: ReaderPool, processes: Discovery, sink: Sink, clock: Clock, node: str, interval_s: float
    ) -> None:
        self._readers, self._processes, self._sink = readers, processes, sink
        self._clock, self._node, self._interval_s = clock, node, interval_s
        self._patience = Patience()

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s * self._patience.factor

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self._patience.reason)]

    def _ask(self, op: str, **args: Any) -> Any:
        return json.loads(self._readers.call(op, timeout=TIMEOUT_S, **args).payload)

    def _put(self, table: str, rows: list[Row]) -> None:
        if rows:
            common = {"node": self._node, "ts": self._clock.pair().real_ns}
            self._sink.put(table, batch_of(table, [{**row, **common} for row in rows]))


class NodeSource(_HostSource):
    """Reads memory, disks and pressure."""

    name = "host"
    table = MEMORY.name

    @classmethod
    def make(cls, context: Context) -> NodeSource:
        interval_s = context.config.host.node_interval_s
        return cls(context.readers, context.processes, context.sink, context.clock, context.node, interval_s)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rows = NodeRows()

    def tick(self) -> None:
        watched = [who for who in self._processes.live() if who.role in _ROLES][:MAX_WATCHED]
        try:
            found = self._ask("node", timeout_ms=int(TIMEOUT_S * 500), targets=[list(who.key) for who in watched])
        except ProbingError as e:
            self._patience.failed(e.message)
            return
        self._patience.answered()
        self._put(MEMORY.name, list(self._rows.memory(found, watched)))
        self._put(DISK.name, list(self._rows.disks(found, watched)))
        self._put(PRESSURE.name, list(self._rows.pressure(found, watched)))


class SpaceSource(_HostSource):
    """Reads how full file systems are. File systems that other machines serve are read one by one, each with a
    deadline.
    """

    name = "file_systems"
    table = FILE_SYSTEMS.name

    @classmethod
    def make(cls, context: Context) -> SpaceSource:
        return cls(context.readers, context.processes, context.sink, context.clock, context.node, SPACE_INTERVAL_S)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._silent: dict[str, int] = {}
        # For each file system that timed out: the number of readings after which it is asked again; 0 after a single
        # timeout.
        self._turns: dict[str, int] = {}
        self._looked = False

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: (self._interval_s if self._looked else FIRST_SPACE_S) * self._patience.factor

    def tick(self) -> None:
        watched = [who for who in self._processes.live() if who.role == "trainer"][:MAX_WATCHED]
        try:
            found = self._ask("space", targets=[list(who.key) for who in watched])
        except ProbingError as e:
            self._patience.failed(e.message)
            return
        rows = [{"scope": "node", "answers": True, **_flags(space)} for space in found["local"]]
        rows += self._shared(found, watched)
        points = [point for point, _, _ in found["served"]]
        self._silent = {point: turns - 1 for point, turns in self._silent.items() if turns > 1 and point in points}
        self._turns = {point: turns for point, turns in self._turns.items() if point in points}
        rows += [self._served(*served) for served in found["served"]]
        silent = [f"{clean_text(point, 128)} does not answer" for point in self._silent]
        self._patience.answered(first_of(silent))
        self._looked = True
        self._put(self.table, rows)

    def _shared(self, found: Header, watched: list[Identity]) -> list[Row]:
        seen = {space["device"] for space in found["local"]}
        rows = []
        for who, space in zip(watched, found["shared"], strict=False):
            if space is not None and space["device"] not in seen:
                seen.add(space["device"])
                common = {"scope": "process", "job": who.job, "run": who.run, "rank": who.rank, "answers": True}
                rows.append({**common, "pid": who.pid, "start_ns": who.start_ns, **_flags(space)})
        return rows

    def _served(self, point: str, kind: str, source: str) -> Row:
        row = {"scope": "node", "mount_point": clean_text(point, 256), "fs_type": kind, "source": source}
        if point in self._silent:
            return {**row, "answers": False}
        try:
            space = self._ask("space", point=point)
        except TargetTimeout:
            before = self._turns.get(point)
            if before is None:
                # A single timeout may only mean that no reader was free.
                self._turns[point] = 0
                return {**row, "answers": None}
            self._turns[point] = self._silent[point] = min(2 * before or FIRST_TURNS, SILENT_TURNS)
            return {**row, "answers": False}
        except ProbingError:
            return {**row, "answers": None}
        self._turns.pop(point, None)
        return {**row, "answers": None if space is None else True, **_flags(space or {})}


def _flags(space: Row) -> Row:
    return {**space, "read_only": bool(space["read_only"])} if "read_only" in space else dict(space)
