"""The source of rows that jobs report: finds the memory of their tables, and stores new rows."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import pyarrow as pa

from probing.api.errors import ConfigError, FormatError, InternalError, ProbingError, StoreError
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.fairness import in_turn
from probing.daemon.ipc import Header
from probing.daemon.job_rows.batches import BUILT_IN, job_batch, metric_batch, span_batch
from probing.daemon.job_rows.memory import MEMORY_LINK, RowMemory, Rows
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.user_tables import UserTables
from probing.daemon.worker import Worker

__all__ = ("JobRows",)

INTERVAL_S = 1.0
READ_TIMEOUT_S = 1.0
# The first and the longest pause between two searches for memory files of a process, s. The pause grows, since most
# jobs have no file.
FIRST_LOOK_S, LAST_LOOK_S = 1.0, 30.0
# A turn reads at most MAX_ROWS rows of a table and at most MAX_TURN_ROWS rows of all jobs, which users share equally. A
# row of more than ROW_BYTES counts as several rows, so that a turn reads about 16 MB at most.
MAX_ROWS, MAX_TURN_ROWS, ROW_BYTES = 8_192, 65_536, 256
# The maximum numbers of tables that are read: of a process, of a user, and in total.
MAX_OF_PROCESS, MAX_OF_USER, MAX_MEMORIES = 40, 256, 512
# A row is read once it is this old, ns: the number of a row may become visible to other CPUs before the row.
SETTLE_NS = 5_000_000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Process:
    """A trainer. ``memories``: its tables by inode, None for a refused table; ``closed``: the inodes of tables that it
    has closed. ``look_at_ns``: when new memory is searched next, CLOCK_MONOTONIC.
    """

    identity: Identity
    memories: dict[int, RowMemory | None] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    look_at_ns: int = 0
    pause_s: float = FIRST_LOOK_S
    ended: bool = False


class JobRows(Source):
    """Reads all trainers each second, in a thread of its own. Nothing is written into a process."""

    name = "job_rows"
    table = "python.trace_event"

    def __init__(
        self,
        readers: ReaderPool,
        tables: UserTables,
        sink: Sink,
        clock: Clock,
        node: str,
        rows_read: Mapping[str, int] = MappingProxyType({}),
        enabled: Callable[[Identity], bool] = lambda _: True,
    ) -> None:
        """``rows_read``: the position up to which an earlier daemon read each memory, by the name that ``_name`` makes.
        ``enabled`` returns whether a process is read."""
        self._enabled = enabled
        self._rows_read = rows_read
        self._readers, self._tables, self._sink, self._clock, self._node = readers, tables, sink, clock, node
        self._processes: dict[ProcessKey, _Process] = {}
        self._lock = threading.Lock()
        # Held during a turn: the last turn runs in ``finish``, and must not read the same rows as a turn of the worker.
        self._turning = threading.Lock()
        self._paused = False
        self._rows = 0
        self._worker = Worker("job_rows", self.turn, lambda: INTERVAL_S, patience_s=READ_TIMEOUT_S)

    @classmethod
    def make(cls, context: Context) -> JobRows:
        return cls(
            context.readers,
            context.find(UserTables),
            context.sink,
            context.clock,
            context.node,
            context.rows_read,
            lambda process: bool(context.settings.value("job_rows.enabled", process)),
        )

    def start(self) -> None:
        self._worker.start()

    def finish(self) -> None:
        """Reads the last rows. Rows that a job writes later stay in its memory for the next daemon."""
        self._worker.stop()
        self.turn()

    def stop(self) -> None:
        self._worker.stop()

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def process_identified(self, process: Identity) -> None:
        if process.role == "trainer":
            with self._lock:
                self._processes.setdefault(process.key, _Process(process)).identity = process

    def started(self, alive: Callable[[int, int], bool]) -> None:
        self._sink.forget([name for name in self._rows_read if not alive(*map(int, name.split(":")[:2]))])

    def process_exited(self, process: Identity) -> None:
        """Requests that the next turn reads the last rows of the process, whose memory this daemon keeps open."""
        with self._lock:
            if (ended := self._processes.get(process.key)) is not None:
                ended.ended = True
        self._worker.wake()

    def states(self, totals: Totals) -> list[SourceState]:
        with self._lock:
            memories = sum(memory is not None for one in self._processes.values() for memory in one.memories.values())
        return [totals.of(self.name, self.table, detail=f"{memories} tables of jobs, {self._rows} rows")]

    def turn(self) -> None:
        """Searches for new memory, and reads all new rows. Thread-safe."""
        with self._turning:
            if not self._paused:
                self._read()

    def _read(self) -> None:
        with self._lock:
            processes = {key: one for key, one in self._processes.items() if one.ended or self._enabled(one.identity)}
        self._find(processes)
        owners = {process.identity.owner for process in processes.values()}
        left = dict.fromkeys(owners, MAX_TURN_ROWS // max(len(owners), 1))
        for key, process in processes.items():
            ended, owner = process.ended, process.identity.owner
            before = left[owner]
            for inode, memory in list(process.memories.items()):
                taken = 0
                if memory is not None:
                    taken = self._take(key, inode, process, memory, left[owner])
                    left[owner] -= taken
                if inode in process.closed and not taken and left[owner] > 0:
                    # Its last rows were read. It is removed, so that it does not count against the limits on tables.
                    process.closed.discard(inode)
                    del process.memories[inode]
                    self._sink.forget([_name(key, inode)])
            if ended and left[owner] == before > 0:
                with self._lock:
                    self._processes.pop(key, None)
                self._sink.forget([_name(key, inode) for inode in process.memories])
        with self._lock:
            # The next turn begins with another process, so that no process is always the last of its user.
            if (first := next(iter(self._processes), None)) is not None:
                self._processes[first] = self._processes.pop(first)

    def _find(self, processes: dict[ProcessKey, _Process]) -> None:
        now = self._clock.pair().mono_ns
        due = {key: one for key, one in processes.items() if not one.ended and one.look_at_ns <= now}
        # All requests share one deadline. The owners take turns, so that processes of one owner that do not answer
        # cannot use up the time of other owners.
        turns = in_turn(due.items(), lambda item: item[1].identity.owner)
        asks = {(key.pid, key.start_ns): partial(_asked, one) for key, one in turns}
        answers = self._readers.call_each("memory_files", asks, timeout=READ_TIMEOUT_S, patience=READ_TIMEOUT_S)
        for key, answer in answers:
            process = due[ProcessKey(*key)]
            found = not isinstance(answer, ProbingError) and bool(answer.header["inodes"])
            process.pause_s = FIRST_LOOK_S if found else min(2 * process.pause_s, LAST_LOOK_S)
            process.look_at_ns = now + round(process.pause_s * 1e9)
            if isinstance(answer, ProbingError):
                continue
            process.closed.update(answer.header["closed"])
            try:
                for inode in answer.header["inodes"]:
                    self._add(answer.take_fd(), inode, process, processes)
            except (OSError, InternalError) as e:
                # The kernel leaves descriptors out of the message if, for example, this process has no free descriptor.
                # The next search finds these tables again.
                _log.warning("tables of process %d cannot be opened: %s", process.identity.pid, e)
            finally:
                answer.close_fds()

    def _add(self, fd: int, inode: int, process: _Process, processes: dict[ProcessKey, _Process]) -> None:
        try:
            process.memories[inode] = self._open(fd, _name(process.identity.key, inode), process, processes)
        finally:
            os.close(fd)

    def _open(self, fd: int, name: str, process: _Process, processes: dict[ProcessKey, _Process]) -> RowMemory | None:
        of_user = Counter(
            one.identity.owner for one in processes.values() for m in one.memories.values() if m is not None
        )
        owner = process.identity.owner
        try:
            if (
                len(process.memories) >= MAX_OF_PROCESS
                or of_user[owner] >= MAX_OF_USER
                or of_user.total() >= MAX_MEMORIES
            ):
                raise FormatError(
                    f"at most {MAX_OF_PROCESS} tables of a process and {MAX_OF_USER} tables of a user are read"
                )
            return RowMemory(fd, self._rows_read.get(name))
        except FormatError as e:
            self._lost(process.identity, "", e.message, None)
            return None

    def _take(self, key: ProcessKey, inode: int, process: _Process, memory: RowMemory, left: int) -> int:
        """Stores new rows of a table, about ``left`` at most. Returns their number; a large row counts as several
        rows.
        """
        if left <= 0:
            return 0
        pair, who = self._clock.pair(), process.identity
        weight = -(-memory.row_bytes // ROW_BYTES)
        most = min(max(left // weight, 1), MAX_ROWS)
        over = process.ended or inode in process.closed
        taken = memory.take(pair.mono_ns - (0 if over else SETTLE_NS), most)
        if over and not len(taken.rows):
            # The job writes no more rows, so a missing row before later rows stays missing. This second call gives it
            # up and returns the later rows.
            taken = memory.take(pair.mono_ns, most)
        table = f"python.{memory.table}"
        if len(taken.rows):
            try:
                self._sink.put(table, self._batch(who, memory, taken.rows, pair), {_name(key, inode): memory.position})
                self._rows += len(taken.rows)
            except (ConfigError, FormatError, StoreError) as e:
                self._lost(who, table, e.message, len(taken.rows))
        if taken.lost:
            self._lost(who, table, "the job wrote rows faster than they are read", taken.lost)
        return len(taken.rows) * weight

    def _batch(self, who: Identity, memory: RowMemory, rows: Rows, pair: ClockPair) -> pa.RecordBatch:
        if memory.table == "trace_event" and memory.columns == BUILT_IN["trace_event"]:
            return span_batch(self._node, who, rows, pair)
        if memory.table == "training_metrics" and memory.columns == BUILT_IN["training_metrics"]:
            return metric_batch(self._node, who, rows, pair)
        table = self._tables.define_for_job(memory.table, memory.columns, who.owner)
        return job_batch(self._node, who, rows, memory.columns, table, pair)

    def _lost(self, who: Identity, table: str, reason: str, count: int | None) -> None:
        now = self._clock.pair().real_ns
        self._sink.lost(Loss(self.name, table, "memory", reason, now, now, count, who.pid))


def _name(key: ProcessKey, inode: int) -> str:
    return f"{key.pid}:{key.start_ns}:{inode}"


def _asked(process: _Process) -> Header:
    return {"link": MEMORY_LINK, "known": list(process.memories)}
