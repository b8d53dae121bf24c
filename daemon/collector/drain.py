"""Writes the rings into the log: drain, assemble, append, commit. In this order a kill at any instant loses nothing.

A ring's consumer position moves only after the log record with the ring's operations is written. The log record also
has this position, so a restarted collector continues from the position in the log, not from the position in the ring.

The draining thread waits only for the log. Records that cannot become rows yet stay in their ring (``ready``,
``takes``). A record that the log refuses is kept as it was assembled, and offered again with a growing backoff.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import FormatError, StoreError
from probing.daemon.bpf.ring import Drained, Ring
from probing.daemon.clock import Clock, ClockPair, until_next
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.source import Loss, RingConsumer
from probing.daemon.store.format import JOB_ROWS, Positions, RingPosition
from probing.daemon.store.store import Store

__all__ = ("DrainLoop", "Positions")

# The intervals at which the rings are polled (a look), s: a look costs less than a wakeup for each record. The interval
# is chosen so that each ring can hold the records of four intervals, at the rate since the last look.
QUIET_LOOK_S, LOOK_S, SOON_S = 0.5, 0.1, 0.01
# If a ring can hold fewer records than this, the rings are polled every LOOK_S even while they are quiet, because a job
# may begin at full speed.
QUIET_RECORDS = 256
# The maximum time for which finished operations wait in a ring, s. Draining costs about the same for one record as for
# a thousand, so records are collected for this long. A power cut loses the records that wait. A query drains the rings
# first.
REST_S = 1.0
# A ring is drained at once when 1/FULL_SHARE of it is filled. A consumer can set another ``full_share``.
FULL_SHARE = 16
MAX_DRAIN_BYTES = 4 << 20
# The retry backoff for a record that the log refused, s: the first pause, and the maximum pause.
RETRY_S, MAX_RETRY_S = 0.5, 10.0
# The time between two garbage collections, s: CPython's automatic garbage collection is off in this process
# (``collector.process``).
GC_S = 120.0
_log = logging.getLogger(__name__)


class _Record(NamedTuple):
    """A record for the log. ``ends``: by ring, the position after the last record taken from it. ``size``: the number
    of bytes taken from the rings.
    """

    batches: dict[str, list[pa.RecordBatch]]
    positions: Positions
    pair: ClockPair
    ends: dict[str, int]
    size: int


class DrainLoop:
    """Drains the rings in a thread. ``consumers``: the consumer of each ring. All of ``each_look`` are called at each
    look at the rings. ``record`` is called with all records that are drained.

    ``takes`` returns how many of a ring's records, from the first on, may become rows now; the rest stays in the ring.
    ``takes`` is called only for consumers with ``identified``, and not if the ring is more than half full.
    """

    def __init__(
        self,
        log: Store,
        rings: Mapping[str, Ring],
        consumers: Mapping[str, RingConsumer],
        buffer: RowBuffer,
        clock: Clock,
        each_look: Iterable[Callable[[], None]] = (),
        lost: Callable[[], Mapping[str, int]] = dict,
        record: Callable[[str, ClockPair, npt.NDArray[Any]], None] | None = None,
        takes: Callable[[npt.NDArray[Any]], int] | None = None,
    ) -> None:
        self._log = log
        self._rings = dict(rings)
        self._consumers = dict(consumers)
        self._buffer = buffer
        self._clock = clock
        self._each_look = tuple(each_look)
        self._lost = lost
        self._record = record
        self._takes = takes
        self._shares = {name: self._consumers[name].full_share or FULL_SHARE for name in self._rings}
        self._rests = {name: self._consumers[name].rest_s or REST_S for name in self._rings}
        self._drained = dict.fromkeys(self._rings, 0.0)
        self._can_rest = all(ring.records_in(ring.size) >= QUIET_RECORDS for ring in self._rings.values())
        # The end of each ring at the last look, and the time of the last look.
        self._ends = {name: ring.end for name, ring in self._rings.items()}
        self._looked = time.monotonic()
        self._positions: Positions = {}
        self._held: set[str] = set()
        self._refused: _Record | None = None
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._wake = threading.Event()
        self._stopped = False
        self._cycles = 0
        self._moved = time.monotonic()
        self._done = threading.Condition()
        self.failure: str | None = None
        self._logged = ""

    def resume(self) -> dict[str, int]:
        """Moves the position of every ring to the end of the records that the log holds. Returns, by ring, the number
        of lost records that were already reported.

        If the consumer position of a ring is ahead of the position in the log, a part of the log with records was lost:
        this is reported as a loss.
        """
        boot_id = self._clock.boot_id
        for name, ring in self._rings.items():
            known = self._log.positions.get(name)
            if known and known.get("boot_id") == boot_id and known.get("map_id") == ring.map_id:
                ring.reset(position := int(known["position"]))
                if ring.position > position:
                    now, count = self._clock.pair().real_ns, ring.records_in(ring.position - position)
                    reason = "the end of the log is missing: the ring was read further"
                    self._buffer.lost(Loss(name, "", "log", reason, now, now, count))
                # The position is in the same log record as the row of the loss, so the loss is reported once.
                self._positions[name] = {**known, "position": ring.position}
        return {name: int(known.get("lost", 0)) for name, known in self._positions.items()}

    def run(self) -> None:
        """Drains until ``stop``. An error of the store is kept as ``failure``, and the drain is tried again."""
        collected = time.monotonic()
        while not self._stopped:
            asked = self._look()
            for step in self._each_look:
                step()
            self._moved = time.monotonic()
            if due := set(self._rings) if asked else self._due():
                self._drain(due)
            if time.monotonic() >= collected + GC_S:
                gc.collect()
                collected = time.monotonic()
        self._takes = None
        self._retry_at = 0.0
        self._drain(set(self._rings))

    def _look(self) -> bool:
        """Waits for the next look at the rings. Returns whether ``flush`` or ``stop`` asked for it."""
        if self._held:
            # While records are held back, a waiting ``flush`` sets ``_wake`` again and again. Without this pause,
            # ``wait`` would return at once each time.
            time.sleep(SOON_S)
        asked = self._wake.wait(SOON_S if self._held else self._pause())
        self._wake.clear()
        return asked

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def flush(self, timeout: float = 1.0) -> str:
        """Waits until the log has all records that are in the rings now. Returns "", or why some are still not in the
        log after ``timeout`` seconds."""
        marks = {name: ring.end for name, ring in self._rings.items() if self._consumers[name].identified}
        with self._done:
            # The running cycle may have read the rings before this call, so only the next cycle counts.
            target = self._cycles + 2

            def over() -> bool:
                self._wake.set()
                logged = self._cycles >= target and all(self._rings[n].position >= end for n, end in marks.items())
                return logged or self.failure is not None or self._stopped

            if not self._done.wait_for(over, timeout):
                return f"the rings were not drained within {timeout:.1f} s, {self.backlog} bytes wait in them"
        return self.failure or ""

    @property
    def age_s(self) -> float:
        """Seconds since the loop last finished a step, such as draining a ring. The loop finishes several steps each
        second, even while the log fails."""
        return time.monotonic() - self._moved

    @property
    def backlog(self) -> int:
        """Bytes that wait in the rings. Thread-safe."""
        return sum(ring.backlog for ring in self._rings.values())

    def once(self, due: Collection[str] | None = None) -> int:
        """Runs one cycle over the rings that are ``due`` (None: all). Returns the number of bytes taken from them.

        Raises StoreError; in that case nothing was committed, and the next cycle offers the same record to the log
        again.
        """
        found = self._refused or self._assembled_record(self._rings if due is None else due)
        self._refused = found
        while found.batches or found.ends:
            try:
                self._log.append(found.batches, found.positions, found.pair)
            except FormatError as e:
                self._leave_out(found, e)
                continue
            self._positions = found.positions
            break
        self._refused = None
        for name, end in found.ends.items():
            self._rings[name].commit(end)
        return found.size

    def _leave_out(self, record: _Record, error: FormatError) -> None:
        """Removes the largest table from a record that is too large: otherwise no later row would reach the log. The
        removed rows are reported as a loss. Raises ``error`` if no table is left.
        """
        if not record.batches:
            raise error
        table = max(record.batches, key=lambda name: sum(batch.nbytes for batch in record.batches[name]))
        count, now = sum(batch.num_rows for batch in record.batches.pop(table)), record.pair.real_ns
        self._buffer.lost(Loss("store", table, "log", error.message, now, now, count))

    def _assembled_record(self, due: Collection[str]) -> _Record:
        pair = self._clock.pair()
        batches, positions, lost = self._buffer.take(), dict(self._positions), self._lost()
        if (rows := self._buffer.taken_read) != self._positions.get(JOB_ROWS, {}).get("rows", {}):
            positions[JOB_ROWS] = {"boot_id": self._clock.boot_id, "rows": rows}
        ends: dict[str, int] = {}
        size = 0
        for name in [name for name in self._rings if name in due]:
            self._moved = time.monotonic()
            ring = self._rings[name]
            records, end = self._take(name, ring)
            if not len(records):
                continue
            size += records.nbytes
            if self._record is not None:
                self._record(name, pair, records)
            ends[name] = end
            positions[name] = self._place(ring, end, lost)
            for table, batch in self._assembled(name, records, pair).items():
                if batch.num_rows:
                    batches.setdefault(table, []).append(batch)
                    self._buffer.rows[table] += batch.num_rows
        # A ring without new records also gets a position if it has lost more records. The row of this loss is in the
        # same log record, so the loss is reported only once.
        for name, ring in self._rings.items():
            if name not in ends and positions.get(name, {}).get("lost", 0) != lost.get(name, 0):
                positions[name] = self._place(ring, ring.position, lost)
        return _Record(batches, positions, pair, ends, size)

    def _take(self, name: str, ring: Ring) -> Drained:
        """Returns the records of a ring that may become rows now."""
        consumer, takes = self._consumers[name], self._takes
        until = None if consumer.ready is None else consumer.ready()
        self._held.discard(name)
        if takes is None or not consumer.identified or ring.backlog * 2 > ring.size:
            return ring.drain(MAX_DRAIN_BYTES, until)

        def some(records: npt.NDArray[Any]) -> int:
            taken = takes(records)
            if taken < len(records):
                self._held.add(name)
            return taken

        return ring.drain(MAX_DRAIN_BYTES, until, some)

    def _place(self, ring: Ring, position: int, lost: Mapping[str, int]) -> RingPosition:
        reported = lost.get(ring.name, 0)
        return {"boot_id": self._clock.boot_id, "map_id": ring.map_id, "position": position, "lost": reported}

    def _assembled(self, name: str, records: npt.NDArray[Any], pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
        try:
            return self._consumers[name].assemble(records, pair)
        except Exception as e:  # the same records would fail each time, and delay all later records
            _log.exception("%d records of ring %s cannot be assembled", len(records), name)
            reason = f"{type(e).__name__} in assembly"
            self._buffer.lost(Loss(name, "", "assembly", reason, pair.real_ns, pair.real_ns, len(records)))
            return {}

    def _due(self) -> set[str]:
        now = time.monotonic()
        return {
            name
            for name, ring in self._rings.items()
            if name in self._held
            or now - self._drained[name] >= self._rests[name]
            or ring.backlog * self._shares[name] >= ring.size
        }

    def _pause(self) -> float:
        """Returns the seconds until the next look, computed from the rate at which the rings filled since the last
        call.
        """
        now = time.monotonic()
        elapsed = max(now - self._looked, 0.001)
        ends = {name: ring.end for name, ring in self._rings.items()}
        # The estimated time until each ring is full, s.
        left = (
            (ring.size - ring.backlog) * elapsed / max(ends[name] - self._ends[name], 1)
            for name, ring in self._rings.items()
        )
        looks_s = min(left, default=1.0) / 4
        self._ends, self._looked = ends, now
        if looks_s < LOOK_S:
            return SOON_S if self.failure is None else LOOK_S
        return until_next(QUIET_LOOK_S) if self._can_rest and looks_s > QUIET_LOOK_S else LOOK_S

    def _drain(self, due: set[str]) -> None:
        if time.monotonic() >= self._retry_at:
            # Records that arrive meanwhile wait for the next cycle: otherwise a flood of records would keep this cycle
            # from ending.
            ends = {name: self._rings[name].end for name in due}
            try:
                while self.once(due) >= MAX_DRAIN_BYTES // 2:
                    self._moved = time.monotonic()
                    if all(self._rings[name].position >= end for name, end in ends.items()):
                        break
                self._taken()
            except StoreError as e:
                self._was_refused(e)
        self._drained |= dict.fromkeys(due, time.monotonic())
        with self._done:
            self._cycles += 1
            self._done.notify_all()

    def _taken(self) -> None:
        if self.failure is not None:
            _log.warning("the log takes rows again")
        self.failure, self._retry_s = None, RETRY_S

    def _was_refused(self, error: StoreError) -> None:
        """Logs the first error of each kind only: a disk can be full for days, and the numbers in the message change
        each time.
        """
        if self.failure is None or self._logged != error.kind:
            _log.error("the log takes no rows, new records stay in the rings while they fit: %s", error.message)
        self.failure, self._logged = error.message, error.kind
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
