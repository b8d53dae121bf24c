"""Rows of the CUDA tables from what the kernel holds, which processes shape."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import Processes, Readers
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import ProcessGone, TargetTimeout
from probing.daemon.clock import ClockPair
from probing.daemon.confined import reader
from probing.daemon.gpu.cuda import frames as cuda_frames
from probing.daemon.gpu.cuda import rows as cuda_rows
from probing.daemon.gpu.cuda.frames import Frames
from probing.daemon.gpu.cuda.rows import LaunchRows, MemoryRows, sync_rows
from probing.daemon.ipc import Message
from probing.daemon.source import Identity

PAIR = ClockPair(1_000_000_000_000, 2_000_000_000_000, 1_700_000_000_000_000_000)
SYNC = np.dtype(
    [
        *((name, "<u8") for name in ("t", "duration_ns", "start_ns", "stream", "event")),
        *((name, "<u4") for name in ("tgid", "tid", "result")),
        ("kind", "u1"),
        ("stream_known", "u1"),
        ("reserved", "u1", 2),
    ]
)
KEY = np.dtype([("start_ns", "<u8"), ("stack", "<u8"), ("tgid", "<u4"), ("kind", "<u2"), ("size_class", "<u2")])
FIELDS = ("allocations", "frees", "bytes", "live", "live_bytes", "errors")
SUM = np.dtype([(name, "<u8") for name in FIELDS])
STACK_KEY = np.dtype([(name, "<u8") for name in ("stack", "start_ns", "tgid")])
FRAMES = np.dtype([("frames", "<u8", 32)])
SHORT = st.integers(0, 2**16 - 1)
LOST = np.dtype([("sums", "<u8"), ("live", "<u8")])
PROCESS = np.dtype([(name, "<u8") for name in ("start_ns", "tgid")])
OF_PROCESS = np.dtype([(name, "<i8") for name in ("sums", "live", "stacks")])
COUNTS = np.dtype([("kernels", "<u8"), ("graphs", "<u8")])
MAPS = (
    b"7f0000000000-7f0000010000 r-xp 00002000 08:01 77 /usr/lib/libtorch_cuda.so\n"
    b"7f0000020000-7f0000030000 r-xp 00000000 08:01 78 /usr/lib/libcudart.so.12\n"
    b"7f0000040000-7f0000050000 r-xp 00000000 08:01 79 /tmp/\x1b[31m" + b"evil" * 60 + b"\n"
    b"7f0000060000-7f0000070000 r-xp 00000000 00:00 0 [anon:/lib/libc.so]\n"
)


def known() -> Processes:
    return Processes(identify=lambda pid, start: Identity(pid, start, "job", "run", "trainer", 3) if pid == 7 else None)


def readers_of_7() -> Readers:
    return Readers(maps=lambda args: Message({}, MAPS) if args["pid"] == 7 else ProcessGone("gone"))


class FakeMap:
    """Elements by the bytes of their keys."""

    def __init__(self, key: np.dtype[Any], value: np.dtype[Any], cpus: int = 0) -> None:
        self.key, self.value, self.cpus = key, value, cpus
        self.elements: dict[bytes, np.ndarray[Any, Any]] = {}

    def put(self, key: Any, value: Any) -> None:
        self.elements[np.array(key, self.key).tobytes()] = np.array(value, self.value)

    def lookup(self, key: Any) -> Any:
        return self.elements.get(np.array(key, self.key).tobytes())

    def update(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def delete(self, key: Any) -> bool:
        raw = key if isinstance(key, bytes) else np.array(key, self.key).tobytes()
        return self.elements.pop(raw, None) is not None

    def items(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        keys = np.frombuffer(b"".join(self.elements), self.key)
        shape = (len(keys), self.cpus) if self.cpus else (len(keys),)
        values = np.frombuffer(b"".join(v.tobytes() for v in self.elements.values()), self.value)
        return keys, values.reshape(shape)


def memory_maps() -> dict[str, FakeMap]:
    lost = FakeMap(np.dtype("<u4"), LOST, 2)
    lost.put(0, [(0, 0), (0, 0)])
    return {
        "cuda_memory_sums": FakeMap(KEY, SUM),
        "cuda_memory_live": FakeMap(STACK_KEY, SUM),
        "cuda_memory_stacks": FakeMap(STACK_KEY, FRAMES),
        "cuda_memory_processes": FakeMap(PROCESS, OF_PROCESS),
        "cuda_memory_lost": lost,
    }


def addresses(*frames: int) -> tuple[list[int]]:
    return ([*frames, *[0] * (32 - len(frames))],)


def rows_of(maps: Mapping[str, FakeMap]) -> MemoryRows:
    return MemoryRows(maps, "node", known(), Frames(readers_of_7()))


@given(st.lists(st.binary(min_size=SYNC.itemsize, max_size=SYNC.itemsize), min_size=1, max_size=20))
def test_any_record_of_a_wait_becomes_a_row(raw: list[bytes]) -> None:
    records = np.frombuffer(b"".join(raw), SYNC)
    batch = sync_rows(records, PAIR, "node", known())
    batch.validate(full=True)
    assert batch.num_rows == len(raw)


def test_waits_say_for_what() -> None:
    records = np.zeros(3, SYNC)
    records["tgid"], records["kind"], records["stream_known"] = [7, 7, 8], [1, 2, 3], [1, 0, 0]
    records["stream"], records["event"], records["result"] = [0, 0, 0], [0, 0xE, 0], [0, 0, 700]
    batch = sync_rows(records, PAIR, "node", known())
    columns = {name: batch.column(name).to_pylist() for name in ("op", "stream", "event", "error", "job", "rank")}
    assert columns == {
        "op": ["stream_synchronize", "event_synchronize", "device_synchronize"],
        "stream": [0, None, None],
        "event": [None, 0xE, None],
        "error": [None, None, "cudaError 700"],
        "job": ["job", "job", None],
        "rank": [3, 3, None],
    }


def test_frames_are_libraries_and_offsets() -> None:
    readers = readers_of_7()
    frames = Frames(readers)
    frames.begin_round()
    found = frames.name(7, 1, [0x7F0000000010, 0x7F0000020020, 0x7F0000010000, 0x7F0000040000])
    assert found[:3] == ["libtorch_cuda.so+0x2010", "libcudart.so.12+0x20", "0x7f0000010000"]
    assert found[3].isprintable()
    assert len(found[3]) < 100
    # Anonymous memory can have any name.
    assert frames.name(7, 1, [0x7F0000060000]) == ["0x7f0000060000"]
    frames.name(7, 1, [1, 2, 3])
    assert len(readers.asked) == 1
    frames.begin_round()
    assert frames.name(7, 1, [1]) == ["0x1"]
    assert len(readers.asked) == 2
    assert frames.name(8, 1, [0x7F0000000010]) == ["0x7f0000000010"]


def test_rows_hold_only_changes_and_their_difference() -> None:
    maps = memory_maps()
    key = (1, 99, 7, 1, 10)
    maps["cuda_memory_stacks"].put((99, 1, 7), addresses(0x7F0000020020, 0x7F0000000010))
    maps["cuda_memory_sums"].put(key, (5, 1, 5000, 4, 4000, 0))
    rows = rows_of(maps)
    rows.begin(PAIR.mono_ns - 10)
    maps["cuda_memory_sums"].put((1, 99, 7, 4, 0), (1, 0, 1, 1, 1, 2))
    maps["cuda_memory_sums"].put(key, (7, 1, 7000, 6, 6000, 0))
    batch = rows.changed(PAIR)
    assert batch.column("interval_ns").to_pylist() == [10, 10]
    assert batch.column("caller").to_pylist() == ["libtorch_cuda.so+0x2010"] * 2
    assert batch.column("kind").to_pylist() == ["device", "host"]
    told = list(zip(*(batch.column(name).to_pylist() for name in ("size_class", *FIELDS)), strict=True))
    assert told == [(1024, 2, 0, 2000, 6, 6000, 0), (1, 1, 0, 1, 1, 1, 2)]
    assert rows.changed(PAIR).num_rows == 0
    rows.forget({(7, 1)})
    assert not maps["cuda_memory_sums"].elements
    assert not maps["cuda_memory_stacks"].elements


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), SHORT, SHORT, st.binary(min_size=48, max_size=48)), max_size=8),
    st.lists(st.binary(min_size=48, max_size=48), min_size=8, max_size=8),
)
def test_any_sum_becomes_a_row(first: list[tuple[int, int, int, bytes]], then: list[bytes]) -> None:
    maps = memory_maps()
    rows = rows_of(maps)
    rows.begin(0)
    sums = maps["cuda_memory_sums"].elements
    for stack, kind, size_class, value in first:
        # Process and start are the kernel's own.
        sums[np.array((1, stack, 7, kind, size_class), KEY).tobytes()] = np.frombuffer(value, SUM)[0]
    rows.changed(PAIR).validate(full=True)
    for key, value in zip(list(sums), then, strict=False):
        sums[key] = np.frombuffer(value, SUM)[0]
    rows.changed(PAIR).validate(full=True)


def test_what_found_no_room_is_reported_once() -> None:
    maps = memory_maps()
    rows = rows_of(maps)
    rows.begin(0)
    maps["cuda_memory_lost"].put(0, [(3, 4), (5, 0)])
    assert (rows.lost(), rows.lost()) == (12, 0)


def test_a_process_with_very_many_sums_does_not_take_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rows, "MAX_ROWS", 4)
    maps = memory_maps()
    rows = rows_of(maps)
    rows.begin(0)
    for round_ in range(1, 3):
        for stack in range(100):
            maps["cuda_memory_sums"].put((1, stack, 8, 1, 10), (round_, 0, 1, 1, 1, 0))
        maps["cuda_memory_sums"].put((1, 99, 7, 1, 10), (round_, 0, 1, 1, 1, 0))
        pids = rows.changed(PAIR).column("pid").to_pylist()
        assert (len(pids), pids.count(7)) == (4, 1)


def test_sums_of_an_ended_process_without_room_in_its_last_report_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rows, "MAX_ROWS", 4)
    maps = memory_maps()
    rows = rows_of(maps)
    rows.begin(0)
    for pid in (7, 8):
        for stack in range(5):
            maps["cuda_memory_sums"].put((1, stack, pid, 1, 10), (1, 0, 1, 1, 1, 0))
    assert rows.changed(PAIR).num_rows == 4
    assert rows.forget({(7, 1)}) == 3
    # The other process has the next report for itself.
    assert rows.changed(PAIR).column("pid").to_pylist() == [8, 8, 8]
    assert rows.forget({(8, 1)}) == 0


def test_maps_that_could_not_be_read_are_read_again_for_a_stack() -> None:
    maps, readers = memory_maps(), readers_of_7()
    rows = MemoryRows(maps, "node", known(), Frames(readers))
    rows.begin(0)
    maps["cuda_memory_stacks"].put((99, 1, 7), addresses(0x7F0000000010))
    readers.failure = TargetTimeout("no answer")
    maps["cuda_memory_sums"].put((1, 99, 7, 1, 10), (1, 0, 1, 1, 1, 0))
    assert rows.changed(PAIR).column("caller").to_pylist() == ["0x7f0000000010"]
    readers.failure = None
    maps["cuda_memory_sums"].put((1, 99, 7, 1, 10), (2, 0, 1, 1, 1, 0))
    assert rows.changed(PAIR).column("caller").to_pylist() == ["libtorch_cuda.so+0x2010"]


def test_processes_that_do_not_answer_do_not_hold_up_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1_000))
    monkeypatch.setattr(cuda_frames, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    readers = Readers(maps=lambda _: TargetTimeout("no answer"))
    frames = Frames(readers)
    frames.begin_round()
    for pid in range(1, 100):
        assert frames.name(pid, 1, [0x10]) == ["0x10"]
    assert len(readers.asked) == cuda_frames.ROUND_S
    frames.begin_round()
    frames.name(100, 1, [0x10])
    assert readers.asked[-1][1]["pid"] == 100


def test_a_process_with_very_many_mappings_takes_little_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    code = ctypes.cast(libc.getpid, ctypes.c_void_p).value
    assert code is not None
    frames = Frames(Readers(maps=lambda args: reader._answer({"op": "maps", **args})))

    def mapped(count: int, protection: int) -> int:
        """Maps this file so often, and returns how many mappings are kept of this process."""
        with Path(__file__).open("rb") as file:
            many = [libc.mmap(None, 4096, protection, mmap.MAP_PRIVATE, file.fileno(), 0) for _ in range(count)]
        frames.begin_round()
        (name, _) = frames.name(os.getpid(), 0, [code, 1])
        assert protection & mmap.PROT_EXEC or name.startswith("libc.so")
        for address in many:
            libc.munmap(ctypes.c_void_p(address), 4096)
        return len(frames._maps[os.getpid(), 0])

    assert mapped(3_000, mmap.PROT_READ) < 1_000
    assert mapped(3_000, mmap.PROT_READ | mmap.PROT_EXEC) <= 1_024


def test_launches_are_differences_over_all_cpus() -> None:
    counts, lost = FakeMap(PROCESS, COUNTS, 2), FakeMap(np.dtype("<u4"), np.dtype("<u8"), 2)
    lost.put(0, [1, 0])
    rows = LaunchRows({"cuda_launches": counts, "cuda_launches_lost": lost}, "node", known())
    counts.put((1, 7), [(10, 0), (0, 0)])
    rows.begin()
    assert rows.changed(PAIR).num_rows == 0
    counts.put((1, 7), [(15, 0), (2, 3)])
    counts.put((4, 8), [(0, 0), (1, 0)])
    # Another process had the pid before.
    counts.put((2, 8), [(0, 5), (0, 0)])
    batch = rows.changed(PAIR)
    fields = ("pid", "start_ns", "rank", "kernels", "graphs")
    assert list(zip(*(batch.column(f).to_pylist() for f in fields), strict=True)) == [
        (7, 1, 3, 7, 3),
        (8, 4, None, 1, 0),
        (8, 2, None, 0, 5),
    ]
    rows.forget({(8, 2)})
    assert counts.lookup((4, 8)) is not None
    rows.forget({(8, 4)})
    assert counts.lookup((4, 8)) is None
    lost.put(0, [3, 4])
    assert (rows.lost(), rows.lost()) == (6, 0)
