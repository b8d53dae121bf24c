"""The bulk reader against a model: a fake ring in memory, written the way the kernel writes it."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from probing.api.errors import FormatError
from probing.daemon.bpf.btf import dtype_from_json, dtype_to_json
from probing.daemon.bpf.recording import Recorder, replay
from probing.daemon.bpf.ring import BUSY, DISCARD, Ring, RingMemory
from probing.daemon.clock import ClockPair

SIZE = 4096
RECORD = np.dtype(
    {"names": ["n", "flag", "comm"], "formats": ["<u8", "u1", "S5"], "offsets": [0, 8, 12], "itemsize": 20}
)
SLOT = 8 + 24


class FakeRing:
    """A producer: its data lies twice in a row, as the kernel maps it."""

    def __init__(self, position: int = 0) -> None:
        self.data = np.zeros(2 * SIZE, "u1")
        self.consumer = np.array([position], "<u8")
        self.producer = np.array([position], "<u8")
        self.headers: dict[int, int] = {}

    def ring(self) -> Ring:
        return Ring("fake", RingMemory(self.consumer, self.producer, self.data, SIZE), RECORD)

    def put(self, payload: bytes, flags: int = 0, length: int = RECORD.itemsize) -> int | None:
        """The record's position, None when the ring is full."""
        at = int(self.producer[0])
        if at + SLOT - int(self.consumer[0]) > SIZE:
            return None
        self.write(at, struct.pack("<II", length | flags, 0) + payload)
        self.producer[0] = at + SLOT
        return at

    def finish(self, at: int, flags: int = 0) -> None:
        self.write(at, struct.pack("<I", RECORD.itemsize | flags))

    def write(self, at: int, raw: bytes) -> None:
        for i, byte in enumerate(raw):
            place = (at + i) % SIZE
            self.data[place] = self.data[place + SIZE] = byte


def record(n: int) -> bytes:
    return np.array((n, n & 0xFF, b"abc"), RECORD).tobytes()


class RingMachine(RuleBasedStateMachine):
    """Records in flight are finished in any order; what is read is a prefix of what was put, without the discarded."""

    def __init__(self) -> None:
        super().__init__()
        # Not a multiple of the slot, so that records lie across the end of the ring.
        self.fake = FakeRing(position=SIZE * 5 + 8)
        self.ring = self.fake.ring()
        self.number = 0
        # position, number, state
        self.model: list[tuple[int, int, str]] = []
        self.read: list[int] = []
        self.expected: list[int] = []

    @rule(state=st.sampled_from(["done", "busy", "discarded"]), count=st.integers(1, 40))
    def put(self, state: str, count: int) -> None:
        flags = {"done": 0, "busy": BUSY, "discarded": DISCARD}[state]
        for _ in range(count):
            at = self.fake.put(record(self.number), flags)
            if at is None:
                return
            self.model.append((at, self.number, state))
            self.number += 1

    @precondition(lambda self: any(state == "busy" for _, _, state in self.model))
    @rule(data=st.data(), discard=st.booleans())
    def finish(self, data: st.DataObject, discard: bool) -> None:
        index = data.draw(st.sampled_from([i for i, entry in enumerate(self.model) if entry[2] == "busy"]))
        at, number, _ = self.model[index]
        self.fake.finish(at, DISCARD if discard else 0)
        self.model[index] = (at, number, "discarded" if discard else "done")

    @rule(slots=st.one_of(st.just(1 << 20), st.integers(0, 60)), commit=st.booleans())
    def drain(self, slots: int, commit: bool) -> None:
        drained = self.ring.drain(slots * SLOT)
        ready = self.ready(self.model, max(slots, 1))
        kept = [number for _, number, state in ready if state == "done"]
        assert drained.records["n"].tolist() == kept
        assert all(row["flag"] == row["n"] & 0xFF and row["comm"] == b"abc" for row in drained.records)
        assert drained.position == self.ring.position + len(ready) * SLOT
        if commit:
            self.ring.commit(drained.position)
            del self.model[: len(ready)]
        # A copy: what the kernel writes later does not show in it.
        assert drained.records.base is None or drained.records.flags.owndata

    @rule(data=st.data(), slots=st.one_of(st.just(1 << 20), st.integers(0, 60)))
    def peek(self, data: st.DataObject, slots: int) -> None:
        before = self.ring.position
        skipped = data.draw(st.integers(0, len(self.model)))
        drained = self.ring.peek(before + skipped * SLOT, slots * SLOT)
        ready = self.ready(self.model[skipped:], max(slots, 1))
        assert drained.records["n"].tolist() == [number for _, number, state in ready if state == "done"]
        assert drained.position == before + (skipped + len(ready)) * SLOT
        assert self.ring.position == before

    @rule(data=st.data(), commit=st.booleans())
    def drain_until(self, data: st.DataObject, commit: bool) -> None:
        wanted = data.draw(st.integers(-2, len(self.model) + 2))
        drained = self.ring.drain(until=self.ring.position + wanted * SLOT)
        ready = self.ready(self.model[: max(wanted, 0)], 1 << 20)
        assert drained.records["n"].tolist() == [number for _, number, state in ready if state == "done"]
        assert drained.position == self.ring.position + len(ready) * SLOT
        if commit:
            self.ring.commit(drained.position)
            del self.model[: len(ready)]

    @staticmethod
    def ready(entries: list[tuple[int, int, str]], most: int) -> list[tuple[int, int, str]]:
        busy = next((i for i, entry in enumerate(entries) if entry[2] == "busy"), len(entries))
        return entries[: min(busy, most)]

    @invariant()
    def backlog_is_what_the_model_holds(self) -> None:
        assert self.ring.backlog == len(self.model) * SLOT


TestRing = RingMachine.TestCase


def test_reset_takes_only_positions_of_the_backlog() -> None:
    fake = FakeRing(position=SIZE)
    ring = fake.ring()
    for n in range(23):
        fake.put(record(n))
    assert not ring.reset(SIZE - SLOT)
    assert not ring.reset(SIZE + 24 * SLOT)
    assert ring.position == SIZE
    assert ring.reset(SIZE + 7 * SLOT)
    assert ring.drain().records["n"].tolist() == list(range(7, 23))
    with pytest.raises(FormatError):
        ring.commit(SIZE)


def test_a_second_reader_goes_on_where_the_first_has_committed() -> None:
    fake = FakeRing(position=SIZE)
    ring = fake.ring()
    for n in range(23):
        fake.put(record(n))
    ring.commit(SIZE + 7 * SLOT)
    assert ring.peek(SIZE).records["n"].tolist() == list(range(7, 23))
    with pytest.raises(FormatError):
        ring.peek(SIZE + 24 * SLOT)


def test_what_is_committed_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRing(position=SIZE)
    ring = fake.ring()
    for n in range(23):
        fake.put(record(n))
    read, commits = ring._read, iter([7, 11])

    def overtaken(*arguments: int) -> object:
        if (at := next(commits, None)) is not None:
            ring.commit(SIZE + at * SLOT)
            # The kernel writes there at once.
            fake.write(SIZE, b"\xff" * SLOT)
        return read(*arguments)

    monkeypatch.setattr(ring, "_read", overtaken)
    assert ring.peek(SIZE).records["n"].tolist() == list(range(11, 23))
    assert ring.peek(SIZE, 3 * SLOT).records["n"].tolist() == [11, 12, 13]


def test_records_of_another_size_are_refused() -> None:
    fake = FakeRing()
    fake.put(record(1), length=RECORD.itemsize + 1)
    with pytest.raises(FormatError):
        fake.ring().drain()


dtypes = st.recursive(
    st.sampled_from(["<u1", "<i4", "<u8", "<f8", "S16"]).map(np.dtype),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4).map(
            lambda fields: np.dtype([(f"f{i}", f) for i, f in enumerate(fields)])
        )
        | st.tuples(inner, st.integers(1, 4)).map(lambda pair: np.dtype((pair[0], (pair[1],))))
    ),
    max_leaves=8,
)


@given(dtypes)
def test_types_survive_json(dtype: np.dtype) -> None:
    assert dtype_from_json(dtype_to_json(dtype)) == dtype
    assert dtype_from_json(dtype_to_json(RECORD)) == RECORD


@pytest.mark.parametrize("value", ["what", {}, {"fields": [["a"]], "itemsize": 1}, {"array": "<u1", "shape": 3}, None])
def test_damaged_types_are_a_format_error(value: object) -> None:
    with pytest.raises(FormatError):
        dtype_from_json(value)


def test_recording_replays_as_the_same_arrays(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    drains = [("a", ClockPair(1, 2, 3), 23), ("b", ClockPair(4, 5, 6), 0), ("a", ClockPair(7, 8, 9), 7)]
    arrays = [np.array([(n, n, b"abc") for n in range(count)], RECORD) for _, _, count in drains]
    with Recorder(path) as recorder:
        for (ring, clock, _), array in zip(drains, arrays, strict=True):
            recorder.write(ring, clock, array)
    replayed = list(replay(path))
    assert [(r.ring, r.clock) for r in replayed] == [(ring, clock) for ring, clock, _ in drains]
    for got, array in zip(replayed, arrays, strict=True):
        assert got.records.dtype == array.dtype
        assert got.records.tolist() == array.tolist()


def test_recording_cut_short_gives_its_whole_blocks_and_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with Recorder(path) as recorder:
        for _ in range(2):
            recorder.write("a", ClockPair(1, 2, 3), np.zeros(5, RECORD))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(list(replay(path))) == 1
    path.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(FormatError):
        list(replay(path))
    path.write_bytes(b"something else")
    with pytest.raises(FormatError):
        list(replay(path))


def test_recording_ends_where_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recording"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path) as recorder:
        recorder.write("a", ClockPair(1, 2, 3), np.zeros(5, RECORD))
        whole = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 99, hard))
        try:
            for _ in range(3):
                recorder.write("a", ClockPair(4, 5, 6), np.zeros(5, RECORD))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(r.ring, r.clock) for r in replay(path)] == [("a", ClockPair(1, 2, 3))]
    assert [record.message for record in caplog.records] == [f"the recording {path} ends here: File too large"]
