"""A ring whose records wait for something is drained up to there and no further."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from probing.daemon.arrow import batch_of
from probing.daemon.bpf.ring import Ring, RingMemory
from probing.daemon.clock import ClockPair, FakeClock
from probing.daemon.collector import drain
from probing.daemon.collector.drain import DrainLoop, Positions
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.source import RingConsumer

RECORD = np.dtype([("value", "<u8")])
SLOT = 16
SIZE = 4096


class Machine:
    """A log, a ring of numbers, and up to where it may be drained."""

    def __init__(self, share: int | None = None, rest_s: float | None = None) -> None:
        self.memory = RingMemory(np.zeros(1, "<u8"), np.zeros(1, "<u8"), memoryview(bytearray(2 * SIZE)), SIZE)
        self.ring = Ring("samples", self.memory, RECORD, map_id=7)
        self.positions: Positions = {}
        self.seen: list[int] = []
        self.until = 0
        clock = FakeClock(mono_ns=5, real_ns=1_000_000_005)
        consumer = RingConsumer(
            self.assemble, "process.events", ready=lambda: self.until, full_share=share, rest_s=rest_s
        )
        self.loop = DrainLoop(self, {"samples": self.ring}, {"samples": consumer}, RowBuffer("n1", clock), clock)

    def append(self, batches: Any, positions: Positions, pair: ClockPair) -> None:
        self.positions = positions

    def push(self, *values: int) -> None:
        for value in values:
            at = int(self.memory.producer[0]) % SIZE
            self.memory.data[at : at + 4] = (8).to_bytes(4, "little")
            self.memory.data[at + 8 : at + 16] = value.to_bytes(8, "little")
            self.memory.producer[0] += SLOT

    def assemble(self, records: Any, pair: ClockPair) -> dict[str, pa.RecordBatch]:
        self.seen += records["value"].tolist()
        return {"process.events": batch_of("process.events", [{"node": "n1", "ts": pair.real_ns}])}


def test_records_that_are_not_ready_stay() -> None:
    machine = Machine()
    machine.push(1, 2, 3)
    machine.loop.once()
    assert (machine.seen, machine.ring.position, machine.positions) == ([], 0, {})
    machine.until = 2 * SLOT
    machine.loop.once()
    assert (machine.seen, machine.ring.position) == ([1, 2], 2 * SLOT)
    assert machine.positions["samples"]["position"] == 2 * SLOT
    machine.until = 3 * SLOT
    machine.loop.once()
    assert machine.seen == [1, 2, 3]


@pytest.mark.parametrize(("share", "due"), [(2, set()), (16, {"samples"})])
def test_a_ring_of_large_records_may_be_fuller(share: int, due: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(share)
    machine.loop._drain({"samples"})
    now = time.monotonic()
    monkeypatch.setattr(drain.time, "monotonic", lambda: now)
    machine.push(*range(SIZE // SLOT // 4))
    assert machine.loop._due() == due


def test_a_ring_may_rest_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(drain.time, "monotonic", lambda: now)
    machine = Machine(rest_s=4.0)
    machine.until = SLOT
    machine.loop._drain({"samples"})
    machine.push(1)
    now += 3.9
    assert machine.loop._due() == set()
    machine.loop.once(machine.loop._due())
    assert machine.seen == []
    now += 0.2
    machine.loop.once(machine.loop._due())
    assert machine.seen == [1]
