"""What a source is, and where its rows go.

A source watches one thing and hands Arrow batches to a ``Sink`` by table name. It knows nothing of files, SQL or RPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

__all__ = ("Identity", "Loss", "ProcessKey", "Processes", "Sink", "Source")


class ProcessKey(NamedTuple):
    """Names a process until the next boot: pids are used again, but not with the same start time.

    ``start_ns`` is CLOCK_BOOTTIME ns.
    """

    pid: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows that are missing from ``table``, for sure or possibly: a gap is a row of ``probing.losses``.

    ``ts_from_ns`` and ``ts_to_ns`` are UTC ns; ``count`` is None when it cannot be known; ``pid`` None means all.
    """

    source: str
    table: str
    stage: str
    reason: str
    ts_from_ns: int
    ts_to_ns: int
    count: int | None = None
    pid: int | None = None


class Sink(Protocol):
    """Safe to call from any thread. Rows are on their way to the log when ``put`` returns, and in it a drain later."""

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        """``batch`` has the physical schema of ``table`` (``probing.api.tables``)."""

    def lost(self, loss: Loss) -> None: ...


class Source(Protocol):
    """``start`` may raise ProbingError: the daemon marks the source degraded with that reason and tries again."""

    name: str

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is, as every table has it. ``rank`` and its kin are None unless ``role`` is trainer."""

    pid: int
    start_ns: int
    job: str
    run: str
    role: str
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    node_rank: int | None = None

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ns)


class Processes(Protocol):
    """Who is who. Safe to call from any thread."""

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """None: never seen, or not identified. A dead process keeps its identity. Waits for nothing."""
