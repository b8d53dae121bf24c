"""Takes over from another version: writes finished and open records in the maps of its programs to the log, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from probing.daemon.bpf.session import Foreign, Session
from probing.daemon.clock import Clock
from probing.daemon.source import Loss, RingConsumer, Sink
from probing.daemon.store.format import RingPosition
from probing.daemon.store.store import Store

__all__ = ("take_over", "take_over_layouts")

_log = logging.getLogger(__name__)
Records = npt.NDArray[Any]


def take_over_layouts(
    session: Session, consumers: Mapping[str, RingConsumer], log: Store, sink: Sink, clock: Clock
) -> None:
    """Writes the records in all layouts of other versions to the log, for rings that have a map of open records.

    Reports the time in which no daemon ran, and adopted programs recorded nothing, as a loss.
    """
    pair = clock.pair()
    for ring, consumer in consumers.items():
        if not consumer.open_map:
            continue
        if session.blind:
            since, until = (t + pair.mono_to_utc_ns for t in session.blind)
            reason = "no daemon ran for longer than a minute, and the programs stopped recording"
            sink.lost(Loss(ring, consumer.table, "kernel", reason, since, until))
        for foreign in session.foreign:
            take_over(foreign, ring, consumer, session.rings[ring].record, log, sink, clock)


def take_over(
    foreign: Foreign,
    ring: str,
    consumer: RingConsumer,
    record: np.dtype[Any],
    log: Store,
    sink: Sink,
    clock: Clock,
) -> None:
    """Writes rows of the records in ``ring`` and in the map of open records of ``foreign``, a stopped layout of another
    version; then removes the layout.

    The position is logged under the name of the layout, so that nothing is written twice if this process is killed in
    between. Fields that the other version lacks are zero, and are reported as a loss.
    """
    pair = clock.pair()
    source = foreign.rings.get(ring)
    name = f"{ring}@{foreign.name}"
    if source is not None and not _is_written(log.positions.get(name), clock.boot_id, source.map_id):
        finished, position = source.drain()
        _, values = foreign.maps[consumer.open_map].items()
        batches: dict[str, list[Any]] = {}
        for records in (_as_ours(finished, record), consumer.abandoned(_as_ours(values, record))):
            for table, batch in consumer.assemble(records, pair).items():
                batches.setdefault(table, []).append(batch)
        log.append(batches, {name: {"boot_id": clock.boot_id, "map_id": source.map_id, "position": position}}, pair)
        if missing := sorted(set(record.names or ()) - set(source.record.names or ())):
            reason = f"the version before did not record {', '.join(missing)}"
            sink.lost(Loss(ring, consumer.table, "assembly", reason, pair.real_ns, pair.real_ns, 0))
    foreign.remove()
    _log.info("took over the records of layout %s", foreign.name)


def _is_written(known: RingPosition | None, boot_id: str, map_id: int) -> bool:
    return known is not None and (known.get("boot_id"), known.get("map_id")) == (boot_id, map_id)


def _as_ours(records: Records, record: np.dtype[Any]) -> Records:
    ours = np.zeros(len(records), record)
    for field in set(record.names or ()) & set(records.dtype.names or ()):
        ours[field] = records[field]
    return ours
