"""Counts the operations of each rank and communicator: the live table ``comm.progress``.

The watch of jobs reads it every second. That is cheap, because it has few rows: one for each rank and communicator.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.arrow_to_numpy import integers
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.fairness import crowding
from probing.daemon.labels.source import Label, Labels
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.records.entities import Entity
from probing.daemon.nccl_uprobes.records.names import OPS
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.source import Identity, Loss, ProcessKey, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("JobProgress",)

_TABLE = "comm.progress"
_TRAINER = "trainer"
_MAX_PROCESSES = 4096
# The maximum number of communicators of a process, and of all processes together (checked after each drain).
_MAX_COMMUNICATORS, _MAX_ROWS = 256, 16_384
# The longest gap between calls is kept for each of the last 64 drains in which there was a gap. These drains cover
# about a minute, or 64 steps of a slow job.
_GAPS = 64
# Gaps count once a process has made this many calls.
_LEAST_CALLS = 8
_KEPT_NS = 600_000_000_000


@dataclass(slots=True)
class _Communicator:
    """The progress of a communicator. Times are CLOCK_MONOTONIC ns, -1 if unknown. ``numbered``: when the operation
    with the sequence number ``seq`` was called."""

    entity: Entity
    numbered: int = -1
    seq: int = -1
    op: int = -1
    calls: int = 0
    last_call: int = -1
    last_done: int = -1


@dataclass(slots=True)
class _Process:
    """The progress of a process. ``attached_ns`` and ``ended_ns``: UTC."""

    who: Identity | None = None
    communicators: OrderedDict[str | None, _Communicator] = field(default_factory=OrderedDict)
    calls: int = 0
    last_call: int = -1
    gaps: deque[int] = field(default_factory=lambda: deque(maxlen=_GAPS))
    attached_ns: int | None = None
    ended_ns: int | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def trains(self) -> bool:
        return self.who is not None and self.who.role == _TRAINER

    @property
    def owner(self) -> int | None:
        return self.who.owner if self.who is not None else None

    @property
    def longest_gap(self) -> int | None:
        return sorted(self.gaps)[-2:][0] if self.gaps else None


class JobProgress(Source):
    """The source of ``comm.progress``. Thread-safe; no method holds the lock for a long time."""

    name = "progress"
    table = _TABLE

    def __init__(self, node: str, clock: Clock, phase: Callable[[ProcessKey], Label | None] = lambda _: None) -> None:
        """``phase`` returns the label ``phase`` of a process."""
        self._node = node
        self._clock = clock
        self._phase = phase
        self._processes: OrderedDict[ProcessKey, _Process] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def make(cls, context: Context) -> JobProgress:
        progress = cls(context.node, context.clock, context.find(Labels).phase)
        context.find(CollectivesSource).observers.append(progress.observe)
        return progress

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {_TABLE: self.rows}

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        return {"process.events": self._observe_events}

    def states(self, totals: Totals) -> list[SourceState]:  # noqa: ARG002
        return []

    def process_identified(self, process: Identity) -> None:
        with self._lock:
            if process.role == _TRAINER or process.key in self._processes:
                self._process(process.key).who = process

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        """Drops the communicators of a program that ended by exec: nothing will be called on them."""
        with self._lock:
            process = self._processes.get(ProcessKey(pid, start_ns))
            if process is not None and process.last_call < mono_ns:
                self._processes[ProcessKey(pid, start_ns)] = _Process(process.who)
            elif process is not None:
                for name in [name for name, found in process.communicators.items() if found.last_call < mono_ns]:
                    del process.communicators[name]

    def process_exited(self, process: Identity) -> None:
        now = self._clock.pair().real_ns
        with self._lock:
            # A trainer without an entry gets an entry: its last operations may be drained after this call.
            if process.role == _TRAINER or process.key in self._processes:
                ended = self._process(process.key, process)
                ended.ended_ns = ended.ended_ns or now
            self._drop_old(now)

    def rows_lost(self, loss: Loss) -> None:
        if loss.stage != "attach" or loss.table != "comm.ops" or loss.pid is None:
            return
        with self._lock:
            for key, process in self._processes.items():
                if key.pid == loss.pid and process.ended_ns is None:
                    process.attached_ns = loss.ts_to_ns

    def observe(self, operations: Operations, pair: ClockPair) -> None:
        """Counts finished ``operations``."""
        del pair
        if not len(operations):
            return
        with self._lock:
            owners = [self._process(ProcessKey(*entity.process), entity.who) for entity in operations.entities]
            for entity, owner, totals in zip(operations.entities, owners, _by_entity(operations), strict=True):
                _count(_communicator(owner, entity), *totals)
            _count_gaps(operations, owners)
            while sum(len(process.communicators) for process in self._processes.values()) > _MAX_ROWS:
                self._drop_communicators()

    def rows(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns ``comm.progress``: a row for each communicator of each process, and one row for each process that has
        no communicators.
        """
        with self._lock:
            self._drop_old(pair.real_ns)
            return batch_of(_TABLE, [row for key in self._processes for row in self._rows_of(key, pair)])

    def _process(self, key: ProcessKey, who: Identity | None = None) -> _Process:
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _Process(who)
            if len(self._processes) > _MAX_PROCESSES:
                self._drop_one()
        if who is not None:
            process.who = who
        return process

    def _drop_one(self) -> None:
        """Drops a process of the owner with the most processes: the oldest process that ended or is not a trainer; if
        there is none, the oldest process.
        """
        owner = crowding(process.owner for process in self._processes.values())
        keys = [key for key, process in self._processes.items() if process.owner == owner]
        useless = (key for key in keys if self._processes[key].ended_ns or not self._processes[key].trains)
        del self._processes[next(useless, keys[0])]

    def _drop_communicators(self) -> None:
        """Drops communicators of the owner with the most communicators: each of this owner's processes loses the older
        half of its communicators. The total is limited, since all rows are made every second, while the drain waits.
        """
        # Each process keeps at least one communicator, so one for each process is not counted. The count is never
        # empty, since there are more communicators than processes.
        owner = crowding(p.owner for p in self._processes.values() for _ in range(len(p.communicators) - 1))
        for process in self._processes.values():
            if process.owner == owner:
                for _ in range(len(process.communicators) // 2):
                    process.communicators.popitem(last=False)

    def _drop_old(self, now: int) -> None:
        old = [key for key, process in self._processes.items() if (process.ended_ns or now) < now - _KEPT_NS]
        for key in old:
            del self._processes[key]

    def _observe_events(self, batch: pa.RecordBatch, pair: ClockPair) -> None:
        del pair
        columns = (batch.column(name).to_pylist() for name in ("event", "pid", "start_ns", "exit_code", "signal"))
        rows = zip(*columns, integers(batch.column("ts")).tolist(), strict=True)
        with self._lock:
            for event, pid, start_ns, code, number, ts in rows:
                process = self._processes.get(ProcessKey(pid, start_ns))
                if event == "exit" and process is not None:
                    process.ended_ns, process.exit_code, process.signal = ts, code, number

    def _rows_of(self, key: ProcessKey, pair: ClockPair) -> Iterator[Row]:
        process = self._processes[key]
        who = process.who
        if who is None or not process.trains:
            return
        label = self._phase(key)
        own = {
            "node": self._node,
            "ts": pair.real_ns,
            "job": who.job,
            "run": who.run,
            "pid": key.pid,
            "start_ns": key.start_ns,
            "rank": who.rank,
            "world_size": who.world_size,
            "owner": who.owner,
            "calls": 0,
            "longest_gap_ns": process.longest_gap,
            "phase": label.value if label else None,
            "phase_since": label.since_ns if label else None,
            "attached": process.attached_ns,
            "ended": process.ended_ns,
            "exit_code": process.exit_code,
            "signal": process.signal,
        }
        if not process.communicators:
            yield own
        for name, communicator in process.communicators.items():
            yield own | _described(name, communicator, pair)


def _described(name: str | None, communicator: _Communicator, pair: ClockPair) -> Row:
    entity = communicator.entity
    return {
        "comm": name,
        "comm_name": entity.comm_name,
        "comm_rank": entity.comm_rank,
        "comm_size": entity.comm_size,
        "backend": entity.backend_name,
        "seq": communicator.seq if communicator.seq >= 0 else None,
        "op": OPS[communicator.op] if communicator.op >= 0 else None,
        "calls": communicator.calls,
        "last_call": communicator.last_call + pair.mono_to_utc_ns,
        "last_done": communicator.last_done + pair.mono_to_utc_ns if communicator.last_done >= 0 else None,
    }


def _communicator(process: _Process, entity: Entity) -> _Communicator:
    communicator = process.communicators.get(entity.comm)
    if communicator is None:
        communicator = process.communicators[entity.comm] = _Communicator(entity)
        if len(process.communicators) > _MAX_COMMUNICATORS:
            process.communicators.popitem(last=False)
    process.communicators.move_to_end(entity.comm)
    communicator.entity = entity
    return communicator


def _by_entity(operations: Operations) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields for each entity: the number of calls, the time and the op of the last call, the time and the sequence
    number of the last call that has a sequence number, and the time of the last end.
    """
    order = np.lexsort((operations.called, operations.entity_of))
    counts = np.bincount(operations.entity_of, minlength=len(operations.entities))
    ends = np.cumsum(counts)
    starts = ends - counts
    last = order[ends - 1]
    with_seq = np.where(operations.seq[order] >= 0, np.arange(len(order)), -1)
    numbered = order[np.maximum(np.maximum.reduceat(with_seq, starts), starts)]
    columns: tuple[npt.NDArray[Any], ...] = (
        counts,
        operations.called[last],
        operations.op[last],
        operations.called[numbered],
        operations.seq[numbered],
        np.maximum.reduceat(operations.finished[order], starts),
    )
    return zip(*(column.tolist() for column in columns), strict=True)


def _count(communicator: _Communicator, calls: int, called: int, op: int, numbered: int, seq: int, done: int) -> None:
    communicator.calls += calls
    if called >= communicator.last_call:
        communicator.last_call, communicator.op = called, op
    # A job may destroy its process group and make another group with the same name, which counts from 0 again. So the
    # number of the latest call is kept, not the largest number.
    if seq >= 0 and numbered >= communicator.numbered:
        communicator.numbered, communicator.seq = numbered, seq
    communicator.last_done = max(communicator.last_done, done)


def _count_gaps(operations: Operations, owners: list[_Process]) -> None:
    """Adds the longest gap between the calls of each process. ``owners``: the process of each entity."""
    numbers = {id(owner): number for number, owner in enumerate(owners)}
    which = np.array([numbers[id(owner)] for owner in owners], np.intp)[operations.entity_of]
    order = np.lexsort((operations.called, which))
    called, which = operations.called[order], which[order]
    starts = np.flatnonzero(np.diff(which, prepend=-1))
    gaps = np.diff(called, prepend=called[:1])
    before = np.array([owners[number].last_call for number in which[starts].tolist()], np.int64)
    # Operations are seen when they end, so the first call of this batch may be older than the last call of the previous
    # batch. That is not a gap.
    gaps[starts] = np.where(before < 0, 0, np.maximum(called[starts] - before, 0))
    longest = np.maximum.reduceat(gaps, starts).tolist()
    lasts = called[np.append(starts[1:], len(called)) - 1].tolist()
    counts = np.diff(np.append(starts, len(called))).tolist()
    for number, gap, last, calls in zip(which[starts].tolist(), longest, lasts, counts, strict=True):
        owner = owners[number]
        # Gaps at the start of a job, for example for compilation, say nothing about its usual gaps.
        if gap and owner.calls >= _LEAST_CALLS:
            owner.gaps.append(gap)
        owner.calls += calls
        owner.last_call = max(owner.last_call, last)
