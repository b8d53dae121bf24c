"""Holds the rows that sources put, until the next drain writes them to the log."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import pyarrow as pa

from probing.api.tables import TABLES, Table
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.source import Loss

__all__ = ("RowBuffer",)

# The maximum number of rows that wait while the log cannot be written; further rows are dropped and counted.
MAX_WAITING_ROWS = 200_000
# The maximum size of the waiting rows, bytes: a record of the log and the memory of this process are limited.
MAX_WAITING_BYTES = 64 << 20
# The approximate size of a column of a batch without its values, bytes.
_COLUMN_BYTES = 256
# The maximum number of distinct losses that wait. Further losses of the same source, table and stage become one loss.
MAX_WAITING_LOSSES = 4096
_OTHERS = "too many processes and reasons at once: these losses are merged"
_log = logging.getLogger(__name__)


class RowBuffer:
    """The ``Sink`` of all sources. For each record of the log, the drain loop takes the rows out of the buffer.

    ``observers``, by table, receive the batches of other sources; ``loss_listeners`` receive each loss.
    """

    def __init__(self, node: str, clock: Clock, tables: Mapping[str, Table] = TABLES) -> None:
        self._node = node
        self._clock = clock
        self._tables = tables
        self.observers: dict[str, list[Callable[[pa.RecordBatch, ClockPair], None]]] = defaultdict(list)
        self.loss_listeners: list[Callable[[Loss], None]] = []
        self._lock = threading.Lock()
        self._batches: dict[str, list[pa.RecordBatch]] = defaultdict(list)
        self._losses: dict[tuple[str, str, str, str, int | None], Loss] = {}
        self._waiting = self._waiting_bytes = 0
        # The positions up to which memory files of jobs were read, by file name. ``_read`` includes all rows that were
        # put, ``taken_read`` only the rows that ``take`` has returned.
        self._read: dict[str, int] = {}
        self.taken_read: dict[str, int] = {}
        self.rows: dict[str, int] = defaultdict(int)
        self.lost_rows: dict[str, int] = defaultdict(int)
        # Reported losses by source and stage.
        self.reported: dict[tuple[str, str], int] = defaultdict(int)

    @property
    def waiting(self) -> int:
        """Returns the number of rows that the next drain writes."""
        return self._waiting

    def put(self, table: str, batch: pa.RecordBatch, read: Mapping[str, int] = MappingProxyType({})) -> None:
        if not batch.num_rows:
            return
        if not batch.schema.equals(self._tables[table].physical):
            raise TypeError(f"rows for {table} do not have its schema")
        size = batch.nbytes + batch.num_columns * _COLUMN_BYTES
        with self._lock:
            # The read positions advance even if the rows are refused: refused rows are recorded as lost and not read
            # again.
            self._read.update(read)
            reason = ""
            if self._waiting + batch.num_rows > MAX_WAITING_ROWS:
                reason = "the log cannot be written"
            elif self._waiting_bytes + size > MAX_WAITING_BYTES:
                reason = "too many bytes of rows wait for the log"
            if reason:
                now = self._clock.pair().real_ns
                self._add_loss(Loss("store", table, "log", reason, now, now, batch.num_rows))
                return
            self._batches[table].append(batch)
            self._waiting += batch.num_rows
            self._waiting_bytes += size
            self.rows[table] += batch.num_rows
        if table in self.observers:
            self.observe(table, batch, self._clock.pair())

    def observe(self, table: str, batch: pa.RecordBatch, pair: ClockPair) -> None:
        """Passes a batch to the observers of its table. ``pair``: the clock readings that belong to the batch."""
        for observer in self.observers.get(table, ()):
            try:
                observer(batch, pair)
            except Exception:  # an observer that fails must not lose the rows or stop the other observers
                _log.exception("an observer of %s failed", table)

    def restore(self, read: Mapping[str, int]) -> None:
        """Takes over the positions up to which the previous collector had read memory files of jobs."""
        with self._lock:
            self._read.update(read)

    def forget(self, read: Iterable[str]) -> None:
        with self._lock:
            for name in read:
                self._read.pop(name, None)

    def lost(self, loss: Loss) -> None:
        with self._lock:
            self._add_loss(loss)
        for listener in self.loss_listeners:
            try:
                listener(loss)
            except Exception:  # a listener that fails must not disturb the source that reports the loss
                _log.exception("a listener to losses failed")

    def _add_loss(self, loss: Loss) -> None:
        self.lost_rows[loss.source] += loss.count or 0
        self.reported[loss.source, loss.stage] += 1
        if _key(loss) not in self._losses and len(self._losses) >= MAX_WAITING_LOSSES:
            loss = replace(loss, reason=_OTHERS, pid=None)
        before = self._losses.get(_key(loss))
        self._losses[_key(loss)] = loss if before is None else _together(before, loss)

    def take(self) -> dict[str, list[pa.RecordBatch]]:
        """Removes and returns all rows, by table; losses become rows of ``probing.losses``. Sets ``taken_read`` to the
        positions that belong to these rows."""
        with self._lock:
            self.taken_read = dict(self._read)
            if not self._batches and not self._losses:
                return {}
            taken = dict(self._batches)
            self._batches = defaultdict(list)
            self._waiting = self._waiting_bytes = 0
            losses, self._losses = list(self._losses.values()), {}
        if losses:
            taken.setdefault("probing.losses", []).append(self._loss_batch(losses))
        return taken

    def _loss_batch(self, losses: list[Loss]) -> pa.RecordBatch:
        now = self._clock.pair().real_ns
        return batch_of(
            "probing.losses",
            [
                {
                    "node": self._node,
                    "ts": now,
                    "source": x.source,
                    "table_name": x.table,
                    "stage": x.stage,
                    "reason": x.reason,
                    "pid": x.pid,
                    "ts_from": x.ts_from_ns,
                    "ts_to": x.ts_to_ns,
                    "count": x.count,
                }
                for x in losses
            ],
        )


def _key(loss: Loss) -> tuple[str, str, str, str, int | None]:
    return loss.source, loss.table, loss.stage, loss.reason, loss.pid


def _together(first: Loss, then: Loss) -> Loss:
    """Merges two losses of the same kind. The count is None if either loss has no count."""
    return replace(
        first,
        ts_from_ns=min(first.ts_from_ns, then.ts_from_ns),
        ts_to_ns=max(first.ts_to_ns, then.ts_to_ns),
        count=None if first.count is None or then.count is None else first.count + then.count,
    )
