"""The live table cpu.tasks: all threads of watched processes, from two looks a tenth of a second apart."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables.cpu import TASKS
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.columns import batch, identities, identity_columns, named, numbers, texts, times
from probing.daemon.host.cpu.ledger import Ledger, Rows, differences, rows_of
from probing.daemon.host.cpu.reading import THREAD
from probing.daemon.host.cpu.selection import ROLES
from probing.daemon.host.cpu.task_stat import ABSENT
from probing.daemon.host.cpu.usage import state_columns
from probing.daemon.ipc import Message
from probing.daemon.processes.readers import Readers
from probing.daemon.source import Identity

__all__ = ("Tasks",)

MAX_PROCESSES = 128
MAX_THREADS = 8_192
APART_S = 0.1
TIMEOUT_S = 2.0
_GROWN = {
    "wall_ns": "mono_ns",
    "delta_user_ns": "user_ns",
    "delta_sys_ns": "sys_ns",
    "delta_total_ns": "exec_ns",
    "run_delay_ns": "run_delay_ns",
}


class _Live(Protocol):
    """``processes.discovery.Discovery``."""

    def live(self) -> list[Identity]: ...


class _Known:
    """The identities of the processes that were asked for."""

    def __init__(self, live: list[Identity]) -> None:
        self._who = {(who.pid, who.start_ns): who for who in live}

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return self._who.get((pid, start_ns))


class Tasks:
    """``apart_s``: the time between the two looks, s."""

    def __init__(self, readers: Readers, processes: _Live, node: str, apart_s: float = APART_S) -> None:
        self._readers, self._processes, self._node, self._apart_s = readers, processes, node, apart_s
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def batch(self, clocks: ClockPair) -> pa.RecordBatch:
        """Returns the rows; none of a process that cannot be read."""
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
        for pid, start_ns, *_ in listing:
            tids = threads.get(str(pid), [])[:left]
            left -= len(tids)
            targets.append([pid, start_ns, False, False, tids, []])
        return targets

    def _ask(self, targets: list[list[Any]]) -> Message:
        return self._readers.call("usage", timeout=TIMEOUT_S, timeout_ms=int(TIMEOUT_S * 500), targets=targets)

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
