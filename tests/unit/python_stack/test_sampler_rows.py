"""Samples into rows: values by hand, hostile records by chance."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples
from sampler_records import FRAMES, SAMPLE, START, TWO_LINES, code, record

from probing.api.tables import table_named
from probing.daemon.clock import ClockPair
from probing.daemon.python_stack.sampling import rows as sampled_rows
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.python_stack.sampling.rows import GRID_NS, SampleRows, stack_id_of
from probing.daemon.python_stack.walk.layouts import TABLE
from probing.daemon.source import Identity, Loss, ProcessKey

PAIR = ClockPair(mono_ns=10**15, boot_ns=10**15, real_ns=1_700_000_000_000_000_000)
HOUR_NS = 3600 * 10**9


class World:
    """Processes with even pids are known, and sampled at 20 Hz."""

    def __init__(self, node: str = "n1") -> None:
        self.known: dict[ProcessKey, Sampled] = {}
        self.losses: list[Loss] = []
        self.train_tid: int | None = None
        self.rows = SampleRows(node, self, self.find, self)

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        if pid % 2:
            return None
        return Identity(pid, start_ns, f"job{pid}", "run", "trainer", rank=pid // 2, train_tid=self.train_tid)

    def find(self, key: ProcessKey) -> Sampled:
        if key not in self.known:
            self.known[key] = Sampled(key, layout=TABLE[3, 11], rate=0 if key[0] % 2 else 20)
        return self.known[key]

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        raise AssertionError("rows go back to the drain")

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def knows(
        self, address: int, func: str, first_line: int = 1, pid: int = 2, table: bytes = TWO_LINES
    ) -> tuple[int, int, int]:
        """A frame in code that the process ``pid`` is known to have."""
        check, found = code(func, first_line, table=table)
        self.find((pid, START)).codes.learn({(address, check): found})
        return address, 0, check

    def samples(self, *records: np.ndarray[Any, Any], pair: ClockPair = PAIR) -> list[dict[str, Any]]:
        return plain(self.assemble(*records, pair=pair).get("python.samples"))

    def assemble(self, *records: np.ndarray[Any, Any], pair: ClockPair = PAIR) -> dict[str, pa.RecordBatch]:
        batches = self.rows.assemble(np.concatenate(records), pair)
        for table, batch in batches.items():
            batch.validate(full=True)
            assert batch.schema == table_named(table).physical
        return batches


@pytest.fixture
def world() -> World:
    return World()


def plain(batch: pa.RecordBatch | None) -> list[dict[str, Any]]:
    if batch is None:
        return []
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()


def frames_of(row: dict[str, Any]) -> list[tuple[str, str, int | None]]:
    return [(f["func"], f["file"], f["lineno"]) for f in row["frames"]]


def test_the_thread_that_issues_the_collectives_trains(world: World) -> None:
    stack = (world.knows(4096, "inner", 7),)
    records = [record(*stack, tid=tid) for tid in (2, 23)]
    assert [(row["tid"], row["trains"]) for row in world.samples(*records)] == [(2, True), (23, False)]
    world.train_tid = 23
    assert [(row["tid"], row["trains"]) for row in world.samples(*records)] == [(2, False), (23, True)]


def test_equal_stacks_of_a_thread_are_one_row(world: World) -> None:
    world.find((2, START)).names[2] = "MainThread"
    inner, outer = world.knows(4096, "inner", 7), world.knows(8192, "outer", 3)
    stack = ((inner[0], 2, inner[2]), outer)
    batches = world.assemble(*(record(*stack, ktime=1_000 + n, flags=4) for n in range(3)))
    (row,) = plain(batches["python.samples"])
    (told,) = plain(batches["python.stacks"])
    assert frames_of(told) == [("inner", "a.py", 9), ("outer", "a.py", 3)]
    assert told["complete"]
    assert row == {
        "node": "n1",
        "ts": (1_000 + PAIR.mono_to_utc_ns) // GRID_NS * GRID_NS,
        "job": "job2",
        "run": "run",
        "pid": 2,
        "start_ns": START,
        "rank": 1,
        "tid": 2,
        "thread": "MainThread",
        "trains": True,
        "stack_id": told["stack_id"],
        "on_cpu": True,
        "gil": True,
        "count": 3,
        "duration_ns": 3 * 10**9 // 20,
    }


@pytest.mark.parametrize(
    "table",
    [
        # An entry of 200 KB, and entries without a line.
        bytes([0x80 | 13 << 3]) + bytes(200_000),
        bytes([0x80 | 15 << 3]) * 200_000,
    ],
)
def test_no_line_table_makes_the_drain_wait(world: World, table: bytes) -> None:
    # GIVEN a deep recursion of a function with a line table that takes long to decode
    address, _, check = world.knows(4096, "deep", table=table)
    frames = [(address, 400_000 + 2 * depth, check) for depth in range(FRAMES)]
    lines = 0

    def count(_: Any, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    # WHEN rows are made of a sample of it
    before = sys.gettrace()
    sys.settrace(count)
    try:
        batches = world.assemble(record(*frames))
    finally:
        sys.settrace(before)
    # THEN few lines of Python run for that, and the stack is whole
    (told,) = plain(batches["python.stacks"])
    assert frames_of(told) == [("deep", "a.py", None)] * FRAMES
    assert lines < 20_000


def test_stacks_of_a_user_with_long_texts_leave_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_rows, "_MAX_TEXT", 3 * 4_100)
    for pid, owner in ((2, 1000), (4, 1000), (6, 1001)):
        world.find(ProcessKey(pid, START)).identity = Identity(pid, START, "j", "r", "trainer", owner=owner)
    # GIVEN five stacks of two processes of a user with long texts, and then one of another user
    long = [
        (pid, world.knows(4096 * n, f"{n}" * 4_096, pid=pid)) for n, pid in ((1, 2), (2, 4), (3, 2), (4, 4), (5, 2))
    ]
    other = world.knows(4096, "short", pid=6)
    records = [record(stack, tgid=pid, tid=pid) for pid, stack in [*long, (6, other)]]
    # WHEN rows are made of them
    batches = world.assemble(*records)
    # THEN each sample has a row, three of them have their stack, and the rest is reported
    assert len(plain(batches["python.samples"])) == 6
    names = [row["frames"][0]["func"][:5] for row in plain(batches["python.stacks"])]
    assert len(names) == 5
    assert {"short", "?"} < set(names)
    assert {loss.table for loss in world.losses} == {"python.samples"}
    assert sum(loss.count or 0 for loss in world.losses) == 2
    # AND the stacks that are sampled again are stored
    again = [row["frames"][0]["func"][:5] for row in plain(world.assemble(*records)["python.stacks"])]
    assert sorted(names + again) == ["11111", "22222", "33333", "44444", "55555", "?", "short"]


@pytest.mark.parametrize("other", [{"tid": 3}, {"kind": 2}, {"flags": 4}, {"flags": 1}, {"ktime": 3 * 10**9}])
def test_what_differs_is_another_row(world: World, other: dict[str, Any]) -> None:
    frame = world.knows(4096, "f")
    rows = world.samples(record(frame), record(frame, **other), record(frame))
    assert sorted(row["count"] for row in rows) == [1, 2]


def test_of_different_processes_nothing_is_added_up(world: World) -> None:
    frames = [world.knows(4096, "f", pid=pid) for pid in (2, 3, 4)]
    rows = world.samples(*(record(frame, tgid=pid, hash=1) for pid, frame in zip((2, 3, 4), frames, strict=True)))
    assert sorted((row["pid"], row["job"], row["rank"], row["duration_ns"]) for row in rows) == [
        (2, "job2", 1, 50_000_000),
        (3, None, None, None),
        (4, "job4", 2, 50_000_000),
    ]
    assert len({row["stack_id"] for row in rows}) == 1


def test_off_the_cpu_times_are_added_up(world: World) -> None:
    frame = world.knows(4096, "f")
    (row,) = world.samples(*(record(frame, kind=2, duration_ns=n, flags=8) for n in (3, 4, 5)))
    assert (row["on_cpu"], row["duration_ns"], row["count"], row["gil"]) == (False, 12, 3, None)


@pytest.mark.parametrize(
    ("waits", "shown"), [((0,), 0), ((1,), 1), ((33, 32), 64), ((33, 33), 68), ((10**9 + 1,), 1_006_632_960)]
)
def test_times_off_the_cpu_have_five_binary_digits(world: World, waits: tuple[int, ...], shown: int) -> None:
    frame = world.knows(4096, "f")
    (row,) = world.samples(*(record(frame, kind=2, duration_ns=n) for n in waits))
    assert row["duration_ns"] == shown
    assert abs(shown - sum(waits)) <= sum(waits) / 32


def test_stack_ids_are_the_same_on_every_node() -> None:
    found = []
    for node, address in (("n1", 4096), ("n2", 65536)):
        world = World(node)
        found.append(world.samples(record(world.knows(address, "f")))[0]["stack_id"])
    assert found[0] == found[1] == stack_id_of([("f", "a.py", 1)], True)
    # Stored rows hold these: they may never change.
    assert stack_id_of([("f", "a.py", 1), ("g", "b.py", None)], True) == 7_523_061_727_889_545_866


@given(st.lists(st.tuples(st.text(), st.text(), st.none() | st.integers(0, 1 << 31))), st.booleans())
def test_a_stack_id_fits_and_tells_what_is_cut(frames: list[tuple[str, str, int | None]], complete: bool) -> None:
    found = stack_id_of(frames, complete)
    assert 0 <= found < 1 << 64
    assert found != stack_id_of(frames, not complete)
    assert found != stack_id_of([*frames, ("f", "a.py", 1)], complete)


def test_a_cut_stack_is_not_the_whole_one(world: World) -> None:
    frame = world.knows(4096, "f")
    batches = world.assemble(record(frame, hash=5), record(frame, hash=5, flags=1), record(frame, hash=5, flags=2))
    rows = plain(batches["python.stacks"])
    assert sorted(row["complete"] for row in rows) == [False, True]
    assert len({row["stack_id"] for row in rows}) == 2


def test_an_address_used_again_is_other_code(world: World) -> None:
    first, second = world.knows(4096, "first", 1), world.knows(4096, "second", 50)
    assert first[2] != second[2]
    batches = world.assemble(record(first), record(second))
    assert sorted(frames_of(row)[0][0] for row in plain(batches["python.stacks"])) == ["first", "second"]


def test_code_that_is_gone_is_reported_and_counted(world: World) -> None:
    known = world.knows(4096, "f")
    gone = [record((9_999, 0, 1), known, ktime=ktime) for ktime in (5, 7)]
    batches = world.assemble(*gone, record(known))
    stacks = plain(batches["python.stacks"])
    assert [("?", "?", None), ("f", "a.py", 1)] in [frames_of(row) for row in stacks]
    (loss,) = world.losses
    assert (loss.stage, loss.count, loss.pid, loss.source, loss.table) == (
        "decode",
        2,
        2,
        "python_samples",
        "python.samples",
    )
    assert (loss.ts_from_ns, loss.ts_to_ns) == (5 + PAIR.mono_to_utc_ns, 7 + PAIR.mono_to_utc_ns)


def test_code_that_is_found_later_is_stored_then(world: World) -> None:
    check, found = code("late")
    world.assemble(record((4096, 0, check)))
    world.find((2, START)).codes.learn({(4096, check): found})
    (row,) = plain(world.assemble(record((4096, 0, check), ktime=9))["python.stacks"])
    assert frames_of(row) == [("late", "a.py", 1)]


def test_threads_that_nobody_knows_are_counted(world: World) -> None:
    unknown = [record(kind=3, ktime=n, tid=n) for n in (4, 9)]
    assert world.assemble(*unknown, record(kind=3, tgid=7)) == {}
    assert [(loss.stage, loss.pid, loss.count) for loss in world.losses] == [("resolve", 2, 2), ("resolve", 7, 1)]


def test_stacks_are_stored_again_after_an_hour(world: World) -> None:
    frame = world.knows(4096, "f")
    told = []
    for n, after in enumerate((0, 1, HOUR_NS, HOUR_NS + 1)):
        pair = ClockPair(PAIR.mono_ns + after, PAIR.boot_ns, PAIR.real_ns + after)
        told.append("python.stacks" in world.assemble(record(frame, ktime=n), pair=pair))
    assert told == [True, False, True, False]


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(min_size=SAMPLE.itemsize, max_size=SAMPLE.itemsize), st.integers(0, 3), st.booleans())
def test_whatever_a_record_holds_becomes_rows_or_losses(data: bytes, kind: int, known: bool) -> None:
    world = World()
    records = np.frombuffer(data * 2, SAMPLE).copy()
    records["kind"] = kind
    if known:
        for frame in records["frames"][0].tolist():
            world.find((int(records["tgid"][0]), int(records["start_ns"][0]))).codes.learn(
                {(frame[0], frame[2]): code("f")[1]}
            )
    batches = world.assemble(records)
    if kind in (1, 2):
        (row,) = world.samples(records)
        assert row["count"] == 2
        (stack,) = plain(batches["python.stacks"])
        assert len(stack["frames"]) == min(int(records["depth"][0]), FRAMES)
    else:
        assert batches == {}
