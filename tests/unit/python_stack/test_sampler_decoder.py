"""Up to where a ring may be drained: code is read before its samples are, or given up in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sampler_records import SLOT, START, FakeRing, code, record

from probing.daemon.python_stack.sampling import decoder as sampled_decoder
from probing.daemon.python_stack.sampling.codes import CodeKey, SampledCode
from probing.daemon.python_stack.sampling.decoder import Decoder
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.source import Identity, ProcessKey

Until = Callable[..., Any]
CODE, OTHER = 4096, 8192


class World:
    """A decoder with processes whose code can be read, once ``readable`` has it."""

    def __init__(self, ring: FakeRing) -> None:
        self.ring = ring
        self.known: dict[ProcessKey, Sampled] = {}
        self.readable: dict[CodeKey, SampledCode] = {}
        self.gone = False
        self.asked: list[list[CodeKey]] = []
        self.unknown: set[ProcessKey] = set()
        self.blocked = threading.Event()
        self.blocked.set()
        self.decoder = Decoder(ring, self.find, self.fetch, self.unknown.update)

    def find(self, key: ProcessKey) -> Sampled:
        return self.known.setdefault(key, Sampled(key))

    def fetch(self, process: Sampled, codes: list[CodeKey]) -> None:
        self.blocked.wait(30)
        self.asked.append(codes)
        process.codes.learn({key: self.readable[key] for key in codes if key in self.readable})
        if self.gone:
            process.codes.give_up(process.codes.missing(codes, time.monotonic()))

    def can_read(self, address: int, func: str) -> tuple[int, int, int]:
        check, found = code(func)
        self.readable[address, check] = found
        return address, 0, check


@pytest.fixture
def ring() -> Iterator[FakeRing]:
    found = FakeRing()
    yield found
    found.close()


@pytest.fixture
def world(ring: FakeRing) -> Iterator[World]:
    found = World(ring)
    yield found
    found.blocked.set()
    found.decoder.stop()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_decoder, "HOLD_S", 0.05)
    monkeypatch.setattr(sampled_decoder, "START_HOLD_S", 0.05)
    monkeypatch.setattr(sampled_decoder, "RETRY_S", 0.01)


def test_records_wait_for_their_code(world: World, ring: FakeRing, until: Until) -> None:
    world.blocked.clear()
    world.decoder.start()
    ring.push(record(world.can_read(CODE, "f")))
    assert world.decoder.ready() == 0
    world.blocked.set()
    until(lambda: world.decoder.ready() == SLOT)
    assert len(world.asked) == 1


def test_a_stack_that_is_known_waits_for_nobody(world: World, ring: FakeRing, until: Until) -> None:
    world.decoder.start()
    frame = world.can_read(CODE, "f")
    ring.push(record(frame))
    until(lambda: world.decoder.ready() == SLOT)
    world.blocked.clear()
    ring.push(record(frame, ktime=7), wake=False)
    assert world.decoder.ready() == 2 * SLOT


def test_what_nobody_was_woken_for_is_found_with_the_next_drain(world: World, ring: FakeRing, until: Until) -> None:
    world.decoder.start()
    ring.push(record(world.can_read(CODE, "f")), wake=False)
    until(lambda: world.decoder.ready() == SLOT)


def test_what_was_in_the_ring_before_is_decoded_first(ring: FakeRing, until: Until) -> None:
    ring.push(record(hash=1), record((OTHER, 0, 1)), wake=False)
    ring.position = SLOT
    world = World(ring)
    frame = world.can_read(CODE, "f")
    world.gone = True
    ring.push(record(frame), wake=False)
    assert world.decoder.ready() == SLOT
    world.decoder.start()
    until(lambda: world.decoder.ready() == 3 * SLOT)
    assert world.asked == [[(OTHER, 1), (CODE, frame[2])]]
    world.decoder.stop()


@pytest.mark.usefixtures("no_patience")
def test_code_that_cannot_be_had_does_not_hold_records_for_ever(world: World, ring: FakeRing, until: Until) -> None:
    world.decoder.start()
    ring.push(record((CODE, 0, 1)), record(world.can_read(OTHER, "f")))
    until(lambda: world.decoder.ready() == 2 * SLOT)
    process = world.find((2, START))
    assert process.codes.get((CODE, 1)) is None
    assert process.codes.get((OTHER, code("f")[0])) is not None


@pytest.mark.usefixtures("no_patience")
def test_a_reader_that_hangs_does_not_hold_records_for_ever(world: World, ring: FakeRing, until: Until) -> None:
    world.blocked.clear()
    world.decoder.start()
    ring.push(record((CODE, 0, 1)))
    until(lambda: world.decoder.ready() == SLOT)


def test_a_process_that_is_gone_holds_nothing_up(world: World, ring: FakeRing, until: Until) -> None:
    world.gone = True
    world.decoder.start()
    ring.push(record((CODE, 0, 1)))
    until(lambda: world.decoder.ready() == SLOT)
    ring.push(record((CODE, 0, 1), ktime=7))
    until(lambda: world.decoder.ready() == 2 * SLOT)
    assert len(world.asked) == 1


def test_the_same_address_with_another_check_is_asked_for_again(world: World, ring: FakeRing, until: Until) -> None:
    world.decoder.start()
    for n, name in enumerate(("first", "second"), 1):
        ring.push(record(world.can_read(CODE, name)))
        until(lambda end=n * SLOT: world.decoder.ready() == end)
    assert len(world.asked) == 2


def test_unknown_threads_are_reported(world: World, ring: FakeRing, until: Until) -> None:
    world.decoder.start()
    ring.push(record(kind=3, tgid=5, tid=6))
    until(lambda: world.unknown == {(5, START)})
    assert world.decoder.ready() == SLOT


def test_it_follows_a_drain_that_went_further(world: World, ring: FakeRing) -> None:
    ring.push(record((CODE, 0, 1)), record((CODE, 0, 1)), wake=False)
    ring.position = 2 * SLOT
    assert world.decoder.ready() == 2 * SLOT


def test_a_decoder_that_failed_once_goes_on(world: World, ring: FakeRing, until: Until) -> None:
    failures = [ValueError("one bad record")]
    fetch = world.decoder._fetch

    def fails(process: Sampled, codes: list[CodeKey]) -> None:
        if failures:
            raise failures.pop()
        fetch(process, codes)

    world.decoder._fetch = fails  # type: ignore[method-assign]
    world.decoder.start()
    ring.push(record(world.can_read(CODE, "f")))
    until(lambda: world.decoder.ready() == SLOT)
    assert not failures


def test_code_that_came_while_another_process_hung_is_still_read(
    world: World, ring: FakeRing, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each wait is over at once.
    monkeypatch.setattr(sampled_decoder, "START_HOLD_S", 0.0)
    monkeypatch.setattr(sampled_decoder, "HOLD_S", 0.0)
    world.blocked.clear()
    world.decoder.start()
    ring.push(record((CODE, 0, 1)))
    until(lambda: world.decoder._pending is not None)
    ring.push(record(world.can_read(OTHER, "f"), tgid=3))
    world.blocked.set()
    until(lambda: world.find(ProcessKey(3, START)).codes.get((OTHER, code("f")[0])) is not None)


def test_users_take_turns_where_processes_do_not_answer(
    world: World, ring: FakeRing, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_decoder, "FETCHES_S", 0.0)
    monkeypatch.setattr(sampled_decoder, "RETRY_S", 0.01)
    order: list[int] = []
    monkeypatch.setattr(world.decoder, "_fetch", lambda process, _: order.append(process.key.pid))
    for pid in (*range(100, 105), 20):
        owner = 7 if pid >= 100 else 8
        world.find(ProcessKey(pid, START)).identity = Identity(pid, START, "job", "run", "trainer", owner=owner)
        ring.push(record((CODE, 0, 1), tgid=pid), wake=False)
    world.decoder.start()
    until(lambda: 100 in order)
    # The ring is looked at again after each fetch.
    world.find(ProcessKey(100, START)).codes.give_up([(CODE, 1)])
    until(lambda: 20 in order)
    assert set(order) <= {100, 101, 20}
