"""What another version's programs hold goes into the log once, whenever the collector is killed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.upgrade import take_over
from probing.daemon.nccl_uprobes.operations.open_operations import abandoned
from probing.daemon.source import RingConsumer

THEIRS = np.dtype([("pid", "<u4"), ("state", "u1")])
OURS = np.dtype([("state", "u1"), ("pid", "<u4"), ("tid", "<u4")])


class Log:
    def __init__(self) -> None:
        self.positions: dict[str, dict[str, Any]] = {}
        self.rows: list[int] = []

    def append(self, batches: Any, positions: dict[str, dict[str, Any]], _: Any) -> None:
        self.rows += [pid for b in batches.get("process.events", ()) for pid in b["pid"].to_pylist()]
        self.positions.update(positions)


def foreign(removed: list[str]) -> Any:
    finished, running = (np.array([(pid, 3) for pid in pids], THEIRS) for pids in ((2, 3, 5), (7,)))
    ring = SimpleNamespace(map_id=23, record=THEIRS, drain=lambda: (finished, 640))
    operations = SimpleNamespace(items=lambda: (None, running))
    maps, rings = {"operations": operations}, {"collectives": ring}
    return SimpleNamespace(name="old", rings=rings, maps=maps, remove=lambda: removed.append("old"))


def test_it_is_written_once_and_removed() -> None:
    clock, log, removed = FakeClock(1, 2), Log(), list[str]()
    outbox = RowBuffer("n1", clock)

    def assemble(records: Any, _: Any) -> dict[str, Any]:
        rows = [{"node": "n1", "ts": 1, "pid": pid} for pid in records["pid"].tolist()]
        return {"process.events": batch_of("process.events", rows)}

    consumer = RingConsumer(assemble, "comm.ops", open_map="operations", abandoned=abandoned)
    # The second time stands for a collector that was killed between writing and removing.
    for _ in range(2):
        take_over(foreign(removed), "collectives", consumer, OURS, log, outbox, clock)  # type: ignore[arg-type]
    assert log.rows == [2, 3, 5, 7]
    assert removed == ["old", "old"]
    (losses,) = outbox.take()["probing.losses"]
    assert losses["reason"].to_pylist() == ["the version before did not record tid"]
