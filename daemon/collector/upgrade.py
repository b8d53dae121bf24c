"""Takes over from another version of the daemon: writes the finished and open records that are in the rings and maps of
that version's programs to the log, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.ring import Ring
from probing.daemon.bpf.session import Foreign, Session
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.collector.drain import MAX_DRAIN_BYTES
from probing.daemon.source import Loss, RingConsumer, Sink
from probing.daemon.store.format import Positions, RingPosition
from probing.daemon.store.store import Store

__all__ = ("take_over", "take_over_layouts")

_log = logging.getLogger(__name__)
Records = npt.NDArray[Any]


def take_over_layouts(
    session: Session, consumers: Mapping[str, RingConsumer], log: Store, sink: Sink, clock: Clock
) -> None:
    """Writes the records in all layouts of other versions to the log.

    Reports a loss for the time in which no daemon ran and the adopted programs recorded nothing.
    """
    pair = clock.pair()
    if session.blind:
        since, until = (t + pair.mono_to_utc_ns for t in session.blind)
        reason = "no daemon ran for longer than a minute, and the programs stopped recording"
        for ring, consumer in consumers.items():
            if consumer.open_map:
                sink.lost(Loss(ring, consumer.table, "kernel", reason, since, until))
    records = {ring: session.rings[ring].record for ring in consumers}
    for foreign in session.foreign:
        take_over(foreign, consumers, records, log, sink, clock)


def take_over(
    foreign: Foreign,
    consumers: Mapping[str, RingConsumer],
    records: Mapping[str, np.dtype[Any]],
    log: Store,
    sink: Sink,
    clock: Clock,
) -> None:
    """Writes the rows of ``foreign``, a stopped layout of another version, to the log: of the records in its rings and
    of the open records in its maps. Then removes the layout. ``records``: the record type of each ring of this version.

    No record is written twice, even if the other version or this process is killed at any point: a ring is read from
    its position in the log, and the log record with the open records also has a position, whose name contains the name
    of the layout. Fields that the other version lacks are zero, and are reported as a loss.
    """
    for ring, consumer in consumers.items():
        if (source := foreign.rings.get(ring)) is not None:
            _Takeover(foreign, source, consumer, records[ring], log, sink, clock).write()
    foreign.remove()
    _log.info("took over the records of layout %s", foreign.name)


class _Takeover:
    """Writes the records of one ring, and its open records."""

    def __init__(
        self,
        foreign: Foreign,
        source: Ring,
        consumer: RingConsumer,
        record: np.dtype[Any],
        log: Store,
        sink: Sink,
        clock: Clock,
    ) -> None:
        self._foreign, self._source, self._consumer, self._record = foreign, source, consumer, record
        self._log, self._sink, self._clock = log, sink, clock

    def write(self) -> None:
        ring = self._source.name
        reported = 0
        if (known := self._known(ring)) is not None:
            # The other version may have been killed after it wrote the log and before it moved the position of the
            # ring.
            self._source.reset(int(known["position"]))
            reported = int(known.get("lost", 0))
        lost = self._lost()
        if lost > reported:
            self._lose("ring", "the ring was full", lost - reported)
        if self._consumer.ready is not None:
            # These records refer to state of the version that wrote them, so this version cannot make rows of them.
            if unread := self._source.records_in(self._source.backlog):
                self._lose("ring", "the previous version had not read them when it ended", unread)
            return
        while len((drained := self._source.drain(MAX_DRAIN_BYTES)).records):
            self._append(drained.records, {ring: self._place(drained.position, lost)})
            self._source.commit(drained.position)
        if self._consumer.open_map:
            self._write_open()

    def _write_open(self) -> None:
        name = f"{self._source.name}@{self._foreign.name}"
        open_map = self._foreign.maps.get(self._consumer.open_map)
        if open_map is None or self._known(name) is not None:
            return
        _, values = open_map.items()
        self._append(values, {name: self._place(self._source.position, 0)}, self._consumer.abandoned)
        if missing := sorted(set(self._record.names or ()) - set(self._source.record.names or ())):
            self._lose("assembly", f"the previous version did not record {', '.join(missing)}", 0)

    def _append(
        self, records: Records, positions: Positions, finished: Callable[[Records], Records] = lambda records: records
    ) -> None:
        """Writes the rows of ``records``. ``finished`` turns open records into finished records."""
        pair = self._clock.pair()
        assembled = self._assembled(records, pair, finished)
        self._log.append({table: [batch] for table, batch in assembled.items() if batch.num_rows}, positions, pair)

    def _assembled(
        self, records: Records, pair: ClockPair, finished: Callable[[Records], Records]
    ) -> Mapping[str, pa.RecordBatch]:
        try:
            return self._consumer.assemble(finished(self._as_ours(records)), pair)
        except Exception as e:  # the same records would fail at each start
            _log.exception("%d records of the previous version cannot be assembled", len(records))
            self._lose("assembly", f"{type(e).__name__} in assembly", len(records))
            return {}

    def _as_ours(self, records: Records) -> Records:
        if records.dtype == self._record:
            return records
        ours = np.zeros(len(records), self._record)
        for field in set(self._record.names or ()) & set(records.dtype.names or ()):
            ours[field] = records[field]
        return ours

    def _known(self, name: str) -> RingPosition | None:
        """Returns the position that the log has under ``name``, None if it belongs to another ring."""
        known = self._log.positions.get(name)
        ours = self._clock.boot_id, self._source.map_id
        return known if known is not None and (known.get("boot_id"), known.get("map_id")) == ours else None

    def _place(self, position: int, lost: int) -> RingPosition:
        boot_id, map_id = self._clock.boot_id, self._source.map_id
        return {"boot_id": boot_id, "map_id": map_id, "position": position, "lost": lost}

    def _lost(self) -> int:
        counters = self._foreign.maps.get(f"{self._source.name}_loss")
        return 0 if counters is None else int(counters.lookup(0)["lost"].sum())

    def _lose(self, stage: str, reason: str, count: int) -> None:
        now = self._clock.pair().real_ns
        self._sink.lost(Loss(self._source.name, self._consumer.table, stage, reason, now, now, count))
