"""What another version's programs hold goes into the log once, whenever a collector is killed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from probing.daemon.arrow import batch_of
from probing.daemon.bpf.ring import Ring, RingMemory
from probing.daemon.clock import FakeClock
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.upgrade import take_over
from probing.daemon.nccl_uprobes.operations.open_operations import abandoned
from probing.daemon.source import RingConsumer

THEIRS = np.dtype([("pid", "<u4"), ("state", "u1")])
OURS = np.dtype([("state", "u1"), ("pid", "<u4"), ("tid", "<u4")])
# A record in a ring: its header and the record, rounded up to 8 bytes.
SLOT = 16
LACKS = "the previous version did not record tid"


class Killed(BaseException):
    """The collector dies here."""


class Log:
    def __init__(self) -> None:
        self.positions: dict[str, dict[str, Any]] = {}
        self.rows: list[int] = []
        self.fatal = 0

    def append(self, batches: Any, positions: dict[str, dict[str, Any]], _: Any) -> None:
        self.rows += [pid for b in batches.get("process.events", ()) for pid in b["pid"].to_pylist()]
        self.positions |= positions
        self.fatal -= 1
        if self.fatal == 0:
            raise Killed


def ring(name: str, pids: list[int], map_id: int) -> Ring:
    data = np.zeros(4096, np.uint8)
    for at, pid in enumerate(pids):
        data[at * SLOT : at * SLOT + 4].view("<u4")[0] = THEIRS.itemsize
        data[at * SLOT + 8 : at * SLOT + 8 + THEIRS.itemsize].view(THEIRS)[0] = (pid, 3)
    consumer, producer = np.zeros(1, "<u8"), np.array([len(pids) * SLOT], "<u8")
    return Ring(name, RingMemory(consumer, producer, memoryview(np.tile(data, 2)), 4096), THEIRS, map_id=map_id)


class Scene:
    """A layout with finished operations 2, 3 and 5, an open one 7, and an event 11 in another ring."""

    def __init__(self) -> None:
        self.removed = 0
        self.log, self.clock = Log(), FakeClock(1, 2)
        self.outbox = RowBuffer("n1", self.clock)
        operations = SimpleNamespace(items=lambda: (None, np.array([(7, 3)], THEIRS)))
        full = SimpleNamespace(lookup=lambda _: {"lost": np.array([4, 1])})
        self.foreign: Any = SimpleNamespace(
            name="old",
            rings={"collectives": ring("collectives", [2, 3, 5], 23), "events": ring("events", [11], 29)},
            maps={"operations": operations, "events_loss": full},
            remove=self._remove,
        )
        made = RingConsumer(self._assemble, "comm.ops", open_map="operations", abandoned=abandoned)
        self.consumers = {"events": RingConsumer(self._assemble, "process.events"), "collectives": made}

    def _remove(self) -> None:
        self.removed += 1

    def _assemble(self, records: Any, _: Any) -> dict[str, Any]:
        rows = [{"node": "n1", "ts": 1, "pid": pid} for pid in records["pid"].tolist()]
        return {"process.events": batch_of("process.events", rows)}

    def start(self) -> None:
        log: Any = self.log
        records = dict.fromkeys(self.consumers, OURS)
        take_over(self.foreign, self.consumers, records, log, self.outbox, self.clock)

    @property
    def losses(self) -> list[tuple[str, int]]:
        (batch,) = self.outbox.take()["probing.losses"]
        return sorted(zip(batch["reason"].to_pylist(), batch["count"].to_pylist(), strict=True))


def test_all_rings_are_written_once_and_the_layout_is_removed() -> None:
    scene = Scene()
    scene.start()
    # The second time stands for a collector that was killed between writing and removing.
    scene.start()
    assert scene.log.rows == [11, 2, 3, 5, 7]
    assert scene.removed == 2


@pytest.mark.parametrize("record", [1, 2, 3])
def test_a_collector_killed_after_any_record_writes_nothing_twice(record: int) -> None:
    scene = Scene()
    scene.log.fatal = record
    with pytest.raises(Killed):
        scene.start()
    scene.start()
    assert scene.log.rows == [11, 2, 3, 5, 7]


def test_what_the_version_before_logged_and_did_not_commit_is_not_written_again() -> None:
    scene = Scene()
    scene.log.positions["collectives"] = {
        "boot_id": scene.clock.boot_id,
        "map_id": 23,
        "position": 2 * SLOT,
        "lost": 0,
    }
    scene.start()
    assert scene.log.rows == [11, 5, 7]


def test_what_the_version_before_lost_and_did_not_report_is_a_loss() -> None:
    scene = Scene()
    scene.log.positions["events"] = {"boot_id": scene.clock.boot_id, "map_id": 29, "position": 0, "lost": 2}
    scene.start()
    assert scene.losses == [(LACKS, 0), ("the ring was full", 3)]


def test_records_that_only_the_version_before_can_read_are_a_loss() -> None:
    scene = Scene()
    own: Callable[[], int] = int
    scene.consumers["events"] = RingConsumer(scene._assemble, "python.samples", ready=own)
    del scene.foreign.maps["events_loss"]
    scene.start()
    assert scene.log.rows == [2, 3, 5, 7]
    assert scene.losses == [(LACKS, 0), ("the previous version had not read them when it ended", 1)]


def test_open_records_that_cannot_be_read_do_not_prevent_the_start() -> None:
    # GIVEN open records whose fields have another form, and a version that has no map of them
    def fails(records: Any) -> Any:
        raise ValueError("could not broadcast input array")

    scene = Scene()
    scene.consumers["collectives"] = RingConsumer(scene._assemble, "comm.ops", open_map="operations", abandoned=fails)
    scene.start()
    assert scene.log.rows == [11, 2, 3, 5]
    assert ("ValueError in assembly", 1) in scene.losses
    scene = Scene()
    del scene.foreign.maps["operations"]
    scene.start()
    assert (scene.log.rows, scene.removed) == ([11, 2, 3, 5], 1)


def test_records_that_cannot_be_assembled_do_not_prevent_the_start() -> None:
    def fails(_: Any, __: Any) -> dict[str, Any]:
        raise KeyError("field")

    scene = Scene()
    scene.consumers["events"] = RingConsumer(fails, "process.events")
    del scene.foreign.maps["events_loss"]
    scene.start()
    assert scene.log.rows == [2, 3, 5, 7]
    assert scene.removed == 1
    assert scene.losses == [("KeyError in assembly", 1), (LACKS, 0)]
