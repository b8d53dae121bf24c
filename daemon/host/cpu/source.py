"""The source of cpu.utilization, which sends a reader one request a second for all processes. It also makes the live
table cpu.tasks, which compares two readings of all threads of watched processes, a tenth of a second apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables.cpu import TASKS, UTILIZATION
from probing.daemon.arrow import batch_of
from probing.daemon.backoff import Patience
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.columns import batch, identities, identity_columns, named, numbers, texts, times
from probing.daemon.context import Context
from probing.daemon.host.cpu.reading import THREAD
from probing.daemon.host.cpu.selection import ROLES, Selection
from probing.daemon.host.cpu.task_files import ABSENT
from probing.daemon.host.cpu.usage import Ledger, Rows, Usage, differences, rows_of, state_columns
from probing.daemon.ipc import Message
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = (
    "CpuSource",
    "Tasks",
)

MAX_PROCESSES = 128
MAX_THREADS = 8_192
APART_S = 0.1
TASKS_TIMEOUT_S = 2.0
_GROWN = {
    "wall_ns": "mono_ns",
    "delta_user_ns": "user_ns",
    "delta_sys_ns": "sys_ns",
    "delta_total_ns": "exec_ns",
    "run_delay_ns": "run_delay_ns",
}


class _Known:
    """The identities of the processes in a request."""

    def __init__(self, live: list[Identity]) -> None:
        self._who = {(who.pid, who.start_ns): who for who in live}

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return self._who.get((pid, start_ns))


class Tasks:
    """Makes rows of cpu.tasks. ``apart_s``: the time between the two readings, s."""

    def __init__(self, readers: ReaderPool, processes: Discovery, node: str, apart_s: float = APART_S) -> None:
        self._readers, self._processes, self._node, self._apart_s = readers, processes, node, apart_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def batch(self, clocks: ClockPair) -> pa.RecordBatch:
        """Returns the rows, without processes that cannot be read."""
        live = [who for who in self._processes.live() if who.role in ROLES][:MAX_PROCESSES]
        listing: list[list[Any]] = [[who.pid, who.start_ns, False, True, [], []] for who in live]
        ledger = Ledger(MAX_THREADS)
        try:
            threads = self._ask(listing).header.get("threads", {})
            targets = self._closely(listing, threads)
            ledger.exchange(rows_of(self._ask(targets).payload))
            self._stopped.wait(self._apart_s)
            answer = self._ask(targets)
        except ProbingError:
            return batch_of(TASKS.name, [])
        rows = rows_of(answer.payload)
        rows = rows[rows["scope"] == THREAD]
        return self._rows(rows, ledger.exchange(rows), _Known(live), answer.header.get("texts", ()), clocks)

    def _closely(self, listing: list[list[Any]], threads: dict[str, list[int]]) -> list[list[Any]]:
        left = MAX_THREADS
        targets = []
        # Processes with few threads come first, so a process with very many threads does not use up the limit for the
        # others.
        by_threads = sorted(listing, key=lambda target: len(threads.get(str(target[0]), [])))
        for number, (pid, start_ns, *_) in enumerate(by_threads):
            tids = threads.get(str(pid), [])[: left // (len(listing) - number)]
            left -= len(tids)
            targets.append([pid, start_ns, False, False, tids, []])
        return targets

    def _ask(self, targets: list[list[Any]]) -> Message:
        return self._readers.call(
            "usage", timeout=TASKS_TIMEOUT_S, timeout_ms=int(TASKS_TIMEOUT_S * 500), targets=targets
        )

    def _rows(self, now: Rows, before: Rows, known: _Known, names: list[str], clocks: ClockPair) -> pa.RecordBatch:
        who, which = identities(known, now["pid"], now["start_ns"])
        grown = differences(now, before)
        return batch(
            TASKS.logical,
            {
                **identity_columns(self._node, who, which, now["pid"], now["start_ns"]),
                "ts": times(np.full(len(now), clocks.real_ns, np.int64)),
                "role": texts([None if one is None else one.role for one in who], which),
                "platform": named(np.zeros(len(now), np.int32), ("linux",)),
                "tid": numbers(now["tid"].astype(np.int32)),
                **state_columns(now, names),
                **{column: numbers(grown[name], grown[name] == ABSENT) for column, name in _GROWN.items()},
            },
        )


TIMEOUT_S = 1.0
# If more processes than this are watched, all of them are read less often, so that the cost does not grow.
_FOR_ONE_INTERVAL = 256


class CpuSource(Source):
    """The source of cpu.utilization. ``interval_s``: the time between two requests for up to 256 watched
    processes, s.
    """

    name = "cpu"
    table = UTILIZATION.name

    def __init__(
        self, readers: ReaderPool, processes: Discovery, sink: Sink, clock: Clock, node: str, interval_s: float
    ) -> None:
        self._readers, self._processes, self._sink = readers, processes, sink
        self._clock, self._node, self._interval_s = clock, node, interval_s
        self._selection, self._ledger = Selection(), Ledger()
        self._tasks = Tasks(readers, processes, node)
        self._watched = 0
        self._patience = Patience()

    @classmethod
    def make(cls, context: Context) -> CpuSource:
        interval_s = context.config.host.cpu_interval_s
        return cls(context.readers, context.processes, context.sink, context.clock, context.node, interval_s)

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s * max(1.0, self._watched / _FOR_ONE_INTERVAL) * self._patience.factor

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {TASKS.name: self._tasks.batch}

    def stop(self) -> None:
        self._tasks.stop()

    def tick(self) -> None:
        live = [who for who in self._processes.live() if who.role in ROLES]
        self._watched = len(live)
        if not live:
            return  # nothing trains, so nothing is read
        request = self._selection.request(live)
        if not request:
            return
        try:
            answer = self._readers.call("usage", timeout=TIMEOUT_S, timeout_ms=int(TIMEOUT_S * 500), **request)
        except ProbingError as e:
            self._patience.failed(e.message)
            return
        left = self._selection.left_out
        self._patience.answered(f"{left} processes are not read: too many run" if left else "")
        rows = rows_of(answer.payload)
        usage = Usage(rows, self._ledger.exchange(rows))
        header = answer.header
        self._selection.listed(header.get("pids", ()), header.get("threads", {}))
        self._selection.counted(usage.thread_counts())
        batch = usage.batch(self._node, self._clock.pair(), self._selection, header.get("texts", ()))
        self._selection.busiest(usage.threads(), usage.shares())
        if batch is not None:
            self._sink.put(self.table, batch)

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, reason=self._patience.reason)]
