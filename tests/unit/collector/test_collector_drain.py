"""The order of drain, assembly, log and commit, and what happens when one of them fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from probing.api.errors import FormatError, StoreError, StoreFull
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.ring import Ring, RingMemory
from probing.daemon.clock import ClockPair, FakeClock
from probing.daemon.collector import daemon_rows, row_buffer
from probing.daemon.collector import drain as drain_module
from probing.daemon.collector.daemon_rows import Status
from probing.daemon.collector.drain import LOOK_S, SOON_S, DrainLoop, Positions
from probing.daemon.collector.row_buffer import MAX_WAITING_LOSSES, RowBuffer
from probing.daemon.source import Loss, RingConsumer

RECORD = np.dtype([("value", "<u8")])
SLOT = 16
SIZE = 4096


class Log:
    """Remembers what was appended; fails on request."""

    def __init__(self) -> None:
        self.records: list[tuple[dict[str, int], Positions]] = []
        self.batches: list[dict[str, list[pa.RecordBatch]]] = []
        self.offered = 0
        self.positions: Positions = {}
        self.error: StoreError | None = None
        self.too_many = 1 << 30

    def append(self, batches: Mapping[str, list[pa.RecordBatch]], positions: Positions, pair: ClockPair) -> None:
        self.offered += 1
        if self.error is not None:
            raise self.error
        if sum(b.num_rows for group in batches.values() for b in group) >= self.too_many:
            raise FormatError("the record is too large")
        self.batches.append({table: list(group) for table, group in batches.items()})
        self.records.append(({t: sum(b.num_rows for b in group) for t, group in batches.items()}, positions))
        self.positions = positions


class Machine:
    def __init__(self) -> None:
        self.memory = RingMemory(np.zeros(1, "<u8"), np.zeros(1, "<u8"), memoryview(bytearray(2 * SIZE)), SIZE)
        self.ring = Ring("collectives", self.memory, RECORD, map_id=7)
        self.log = Log()
        self.clock = FakeClock(mono_ns=5, real_ns=1_000_000_005)
        self.outbox = RowBuffer("n1", self.clock)
        self.seen: list[int] = []
        self.fails = False

    def loop(self, **more: Any) -> DrainLoop:
        consumer = RingConsumer(self.assemble, "process.events", identified=True)
        return DrainLoop(
            self.log,
            {"collectives": self.ring},
            {"collectives": consumer},
            self.outbox,
            self.clock,
            lost=lambda: {"collectives": 3},
            **more,
        )

    def push(self, *values: int) -> None:
        for value in values:
            at = int(self.memory.producer[0]) % SIZE
            self.memory.data[at : at + 4] = (8).to_bytes(4, "little")
            self.memory.data[at + 8 : at + 16] = value.to_bytes(8, "little")
            self.memory.producer[0] += SLOT

    def assemble(self, records: Any, pair: ClockPair) -> dict[str, pa.RecordBatch]:
        if self.fails:
            raise ValueError("no such thing")
        self.seen += records["value"].tolist()
        rows = [{"node": "n1", "ts": pair.real_ns, "pid": v} for v in records["value"].tolist()]
        return {"process.events": batch_of("process.events", rows)}


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_the_position_moves_behind_what_is_logged(machine: Machine) -> None:
    machine.push(*range(23))
    assert machine.loop().once() == 23 * 8
    place = {"boot_id": machine.clock.boot_id, "map_id": 7, "position": 23 * SLOT, "lost": 3}
    assert machine.log.records == [({"process.events": 23}, {"collectives": place})]
    assert machine.ring.position == 23 * SLOT


def test_nothing_is_logged_when_nothing_happened(machine: Machine) -> None:
    machine.loop().once()
    assert machine.log.records == []


def test_a_log_that_fails_loses_nothing(machine: Machine) -> None:
    loop = machine.loop()
    machine.push(1, 2, 3)
    machine.outbox.put("process.events", batch_of("process.events", [{"node": "n1", "ts": 1}]))
    machine.log.error = StoreFull("full")
    with pytest.raises(StoreFull):
        loop.once()
    assert machine.ring.position == 0
    machine.log.error = None
    loop.once()
    assert [rows for rows, _ in machine.log.records] == [{"process.events": 4}]
    assert machine.ring.position == 3 * SLOT


def test_a_record_that_is_too_large_costs_its_largest_table_alone(machine: Machine) -> None:
    loop = machine.loop()
    machine.push(1, 2, 3)
    machine.outbox.put("process.events", batch_of("process.events", [{"node": "n1", "ts": 1}]))
    machine.outbox.put("host.memory", batch_of("host.memory", [{"node": "n1", "ts": 1}] * 200))
    machine.log.too_many = 100
    loop.once()
    loop.once()
    assert [rows for rows, _ in machine.log.records] == [{"process.events": 4}, {"probing.losses": 1}]
    assert machine.ring.position == 3 * SLOT
    (losses,) = machine.log.batches[1]["probing.losses"]
    found = [losses[name].to_pylist() for name in ("source", "table_name", "reason", "count")]
    assert found == [["store"], ["host.memory"], ["the record is too large"], [200]]


def test_rows_that_wait_have_a_limit_in_bytes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buffer, "MAX_WAITING_BYTES", 1 << 16)
    large = batch_of("process.events", [{"node": "n1", "ts": 1, "detail": "x" * 40_000}])
    for _ in range(3):
        machine.outbox.put("process.events", large)
    assert {name: sum(b.num_rows for b in group) for name, group in machine.outbox.take().items()} == {
        "process.events": 1,
        "probing.losses": 1,
    }
    # AND there is room again once the log has these rows
    machine.outbox.put("process.events", large)
    assert list(machine.outbox.take()) == ["process.events"]


def test_a_restart_goes_on_behind_the_log(machine: Machine) -> None:
    machine.push(1, 2, 3, 5, 7)
    place = {"boot_id": machine.clock.boot_id, "map_id": 7, "position": 3 * SLOT, "lost": 11}
    machine.log.positions = {"collectives": place}
    loop = machine.loop()
    assert loop.resume() == {"collectives": 11}
    loop.once()
    assert machine.seen == [5, 7]


def test_a_log_that_lost_its_end_is_a_loss_of_as_many_records_as_the_ring_knows(machine: Machine) -> None:
    # GIVEN a ring that was read to the fifth record, and a log that only has the second
    machine.push(1, 2, 3, 5, 7, 11)
    machine.memory.consumer[0] = 5 * SLOT
    machine.log.positions = {
        "collectives": {"boot_id": machine.clock.boot_id, "map_id": 7, "position": 2 * SLOT, "lost": 3}
    }
    loop = machine.loop()
    loop.resume()
    # It is reported once, also when nothing comes from the ring for a while.
    loop.once(due=[])
    (losses,) = machine.log.batches[0]["probing.losses"]
    assert losses["stage"].to_pylist() == ["log"]
    assert losses["count"].to_pylist() == [3]
    machine.loop().resume()
    assert machine.outbox.take() == {}
    loop.once()
    assert machine.seen == [11]


def test_a_loss_reported_while_its_ring_is_empty_is_not_reported_again_after_a_kill(machine: Machine) -> None:
    # GIVEN a record with the row of a loss, and nothing of the ring that lost
    loop = machine.loop()
    machine.outbox.lost(Loss("collectives", "comm.ops", "ring", "the ring was full", 1, 2, 3))
    loop.once()
    # THEN a restart knows that it was reported
    assert machine.log.records[-1][0] == {"probing.losses": 1}
    assert machine.loop().resume() == {"collectives": 3}
    # and the same when the ring is not looked at
    machine.push(1)
    machine.log.positions["collectives"]["lost"] = 2
    later = machine.loop()
    later.resume()
    machine.outbox.lost(Loss("collectives", "comm.ops", "ring", "the ring was full", 1, 2, 1))
    later.once(due=[])
    assert machine.seen == []
    assert machine.log.positions["collectives"]["lost"] == 3
    assert machine.log.positions["collectives"]["position"] == 0


@pytest.mark.parametrize("other", [{"boot_id": "another boot"}, {"map_id": 8}])
def test_positions_of_another_ring_are_not_used(machine: Machine, other: dict[str, Any]) -> None:
    machine.push(1, 2, 3)
    place = {"boot_id": machine.clock.boot_id, "map_id": 7, "position": 2 * SLOT, "lost": 0}
    machine.log.positions = {"collectives": {**place, **other}}
    loop = machine.loop()
    assert loop.resume() == {}
    loop.once()
    assert machine.seen == [1, 2, 3]


def test_records_that_cannot_be_assembled_are_a_loss_and_hold_nothing_up(machine: Machine) -> None:
    loop = machine.loop()
    machine.fails = True
    machine.push(1, 2, 3, 5, 7)
    loop.once()
    machine.fails = False
    machine.push(11)
    loop.once()
    assert machine.seen == [11]
    assert machine.outbox.lost_rows["collectives"] == 5
    assert machine.outbox.reported == {("collectives", "assembly"): 1}
    assert [rows for rows, _ in machine.log.records][-1] == {"process.events": 1, "probing.losses": 1}


def test_status_says_when_the_drain_stands_still(machine: Machine, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_rows, "STILL_S", 0.3)
    # GIVEN a loop whose step does not end
    held, entered = threading.Event(), threading.Event()

    def step() -> None:
        entered.set()
        held.wait()

    loop = machine.loop(each_look=(step,))
    machine.push(*range(7))
    status = Status(1, machine.clock.boot_id)
    status.ready, status.drain = True, lambda: (loop.age_s, loop.backlog)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        assert entered.wait(10)
        # THEN its age grows, and status is not "running"
        until(lambda: status.to_dict()["state"] == "degraded")
        found = status.to_dict()
        assert found["drain_age_ms"] >= 300
        assert found["drain_backlog_bytes"] == 7 * SLOT
        assert "have not been drained" in found["reason"]
    finally:
        held.set()
        # AND it runs again once the step ends
        until(lambda: status.to_dict()["state"] == "running")
        loop.stop()
        thread.join()


@pytest.fixture
def running(machine: Machine) -> Iterator[Callable[..., DrainLoop]]:
    """Starts a loop in a thread of its own, which ends with the test."""
    started: list[tuple[DrainLoop, threading.Thread]] = []

    def start(**more: Any) -> DrainLoop:
        loop = machine.loop(**more)
        thread = threading.Thread(target=loop.run)
        thread.start()
        started.append((loop, thread))
        return loop

    yield start
    for loop, thread in started:
        loop.stop()
        thread.join()


def test_a_full_log_is_offered_the_same_record_ever_more_rarely(
    machine: Machine,
    running: Callable[..., DrainLoop],
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # GIVEN a log that takes nothing
    monkeypatch.setattr(drain_module, "RETRY_S", 0.001)
    machine.log.error = StoreFull("no space")
    machine.push(*range(23))
    loop = running()
    until(lambda: machine.log.offered >= 5)
    # THEN the records were assembled once, their rows counted once, and our log says it once
    assert machine.seen == list(range(23))
    assert machine.outbox.rows["process.events"] == 23
    assert [r.message for r in caplog.records if "takes no rows" in r.message] == [caplog.messages[0]]
    assert loop.flush() == loop.failure == "no space"
    # AND not again for other numbers of the same kind of error
    machine.log.error = StoreFull("7 bytes are free")
    until(lambda: loop.failure == "7 bytes are free")
    assert len([r for r in caplog.records if "takes no rows" in r.message]) == 1
    # AND the pauses grow
    assert loop._retry_s >= 0.001 * 2**4
    # WHEN there is space again, all is in the log once, with what came meanwhile
    machine.push(*range(23, 30))
    machine.log.error = None
    until(lambda: machine.ring.position == 30 * SLOT)
    assert machine.seen == list(range(30))
    assert sum(rows["process.events"] for rows, _ in machine.log.records) == 30
    assert loop.failure is None
    assert [r.message for r in caplog.records if "again" in r.message] == ["the log takes rows again"]
    until(lambda: loop.flush() == "")


def test_a_flush_that_does_not_come_through_says_why(
    machine: Machine, running: Callable[..., DrainLoop], until: Any
) -> None:
    held = threading.Event()
    loop = running(each_look=(held.wait,))
    machine.push(*range(7))
    assert "112 bytes wait" in loop.flush(0.01)
    held.set()
    until(lambda: loop.flush() == "")
    assert machine.seen == list(range(7))


def test_a_flush_does_not_wait_longer_for_a_log_that_hangs(
    machine: Machine, running: Callable[..., DrainLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, held = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        entered.set()
        held.wait()

    monkeypatch.setattr(machine.log, "append", hang)
    machine.push(*range(7))
    loop = running()
    assert entered.wait(20)
    said: list[str] = []
    caller = threading.Thread(target=lambda: said.append(loop.flush(0.01)))
    caller.start()
    caller.join(20)
    waits = caller.is_alive()
    held.set()
    caller.join()
    assert not waits
    assert said == ["the rings were not drained within 0.0 s, 112 bytes wait in them"]


def test_a_flush_waits_for_records_whose_process_is_about_to_be_identified(
    machine: Machine, running: Callable[..., DrainLoop]
) -> None:
    # GIVEN 23 records, the 5th of a process that is identified at the third look
    looks: list[int] = []

    def takes(records: Any) -> int:
        looks.append(len(records))
        return len(records) if len(looks) > 2 else 4

    machine.push(*range(23))
    loop = running(takes=takes)
    # THEN those before it are not held up, and a flush waits for all
    assert loop.flush(20) == ""
    assert looks[0] == 23
    assert machine.log.records[0][0] == {"process.events": 4}
    assert machine.seen == list(range(23))


def test_a_ring_that_is_half_full_holds_nothing(machine: Machine) -> None:
    loop = machine.loop(takes=lambda _: 0)
    machine.push(*range(7))
    loop.once()
    assert machine.seen == []
    machine.push(*range(7, SIZE // SLOT // 2 + 1))
    loop.once()
    assert machine.seen == list(range(SIZE // SLOT // 2 + 1))


def test_a_flood_of_records_lets_the_drain_end_and_count_what_was_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    # GIVEN a job that makes records as fast as the drain takes them
    monkeypatch.setattr(drain_module, "MAX_DRAIN_BYTES", 4 * SLOT)
    appended = threading.Event()

    def assemble(records: Any, pair: ClockPair) -> dict[str, pa.RecordBatch]:
        machine.push(*range(len(records)))
        appended.set()
        return {}

    monkeypatch.setattr(machine, "assemble", assemble)
    looks: list[float] = []
    loop = machine.loop(each_look=(lambda: looks.append(loop.age_s),))
    machine.push(*range(8))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    # THEN the other work of the thread goes on, and the drain can be stopped
    assert appended.wait(20)
    before = len(looks)
    until(lambda: len(looks) > before + 2)
    loop.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_losses_of_very_many_processes_hide_no_other_loss(machine: Machine) -> None:
    # GIVEN as many losses as may wait, each of another process of a stranger
    for pid in range(MAX_WAITING_LOSSES):
        machine.outbox.lost(Loss("cuda", "cuda.syncs", "kernel", "too often", 1, 2, 3, pid))
    for count in (5, 6):
        machine.outbox.lost(Loss("collectives", "comm.ops", "ring", "the ring was full", 1, 2, count))
    # THEN the rows have all that was lost
    (batch,) = machine.outbox.take()["probing.losses"]
    lost = Counter[str]()
    for row in batch.select(["table_name", "count"]).to_pylist():
        lost[row["table_name"]] += row["count"]
    assert lost == {"cuda.syncs": 3 * MAX_WAITING_LOSSES, "comm.ops": 11}


def test_a_loss_that_goes_on_while_the_log_is_full_is_one_row(machine: Machine) -> None:
    for second in range(23):
        machine.outbox.lost(Loss("collectives", "comm.ops", "ring", "the ring was full", second, second + 1, 7))
    machine.outbox.lost(Loss("lifecycle", "process.events", "ring", "the ring was full", 3, 4, None))
    machine.outbox.lost(Loss("lifecycle", "process.events", "ring", "the ring was full", 4, 5, 2))
    machine.loop().once()
    (losses,) = machine.log.batches[0]["probing.losses"]
    assert losses["count"].to_pylist() == [23 * 7, None]
    assert losses["ts_to"].cast(pa.int64()).to_pylist() == [23, 5]


def test_rings_are_looked_at_the_more_often_the_faster_they_fill(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.25]
    monkeypatch.setattr("probing.daemon.collector.drain.time.monotonic", lambda: now[0])
    loop = machine.loop()

    def pause(records: int) -> float:
        """After a second in which ``records`` came."""
        machine.push(*range(records))
        now[0] += 1.0
        return loop._pause()

    # 256 records fit. 80 more a second are full in 2.2 s, 70 more in 1.5 s, and 80 more in 0.3 s.
    assert pause(0) == pause(80) == 0.25
    assert pause(70) == LOOK_S
    assert pause(80) == SOON_S
    machine.ring.commit(machine.ring.end)
    assert pause(0) == 0.25
    # WHEN a ring has so few records that a job's first half second could fill it
    loop._can_rest = False
    assert pause(0) == LOOK_S


def test_a_ring_that_is_full_has_no_other_drained(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.daemon.collector.drain.time.monotonic", lambda: 0.5)
    other = Ring("other", RingMemory(np.zeros(1, "<u8"), np.zeros(1, "<u8"), memoryview(bytearray(8)), 4), RECORD)
    loop = DrainLoop(
        machine.log,
        {"collectives": machine.ring, "other": other},
        {
            "collectives": RingConsumer(machine.assemble, "process.events"),
            "other": RingConsumer(machine.assemble, "process.events", full_share=1 << 20),
        },
        machine.outbox,
        machine.clock,
    )
    assert loop._due() == set()
    machine.push(*range(SIZE // SLOT // 16))
    assert loop._due() == {"collectives"}


def test_each_ring_is_a_step(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine full rings may take longer than the watchdog waits."""
    now, ages, second = [100.0], [], Machine()
    monkeypatch.setattr("probing.daemon.collector.drain.time.monotonic", lambda: now[0])

    def slow(_: Any, __: ClockPair) -> dict[str, pa.RecordBatch]:
        ages.append(loop.age_s)
        now[0] += 20.0
        return {}

    rings = {"collectives": machine.ring, "other": second.ring}
    consumers = dict.fromkeys(rings, RingConsumer(slow, "process.events"))
    loop = DrainLoop(machine.log, rings, consumers, machine.outbox, machine.clock)
    machine.push(7)
    second.push(7)
    loop.once()
    assert ages == [0.0, 0.0]
