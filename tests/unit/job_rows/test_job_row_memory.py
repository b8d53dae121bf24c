"""The memory that a job writes and the daemon reads: whole rows, each once, and no harm from its bytes."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import probing
from probing import rows as written
from probing.api.errors import FormatError
from probing.daemon.job_rows.memory import RowMemory

ALL = 1 << 62


@pytest.fixture
def table() -> Iterator[probing.ExternalTable]:
    yield probing.ExternalTable("losses", ["step", "loss", "where"])
    probing.ExternalTable.drop("losses")


def memory_of(table: probing.ExternalTable, position: int | None = None) -> RowMemory:
    assert table._ring is not None
    return RowMemory(table._ring.fd, position)


def steps(memory: RowMemory, most: int = 100_000) -> list[int]:
    return memory.take(ALL, most).rows[":step"].tolist()


def test_rows_come_once_and_in_order(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    memory = memory_of(table)
    assert (memory.table, memory.columns) == ("losses", {"step": "i64", "loss": "f64", "where": "text"})
    assert steps(memory) == [0]
    for step in range(1, 24):
        table.append([step, None, "é" * step])
    assert steps(memory, most=7) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(memory) == list(range(8, 24))
    assert steps(memory) == []
    assert probing.ExternalTable.get_or_create("losses", ["other"]) is table
    table.append_many([[step, 0.5, "b"] for step in (24, 25)])
    assert steps(memory) == [24, 25]
    again = memory_of(table, position=20)
    assert steps(again) == [19, 20, 21, 22, 23, 24, 25]


def test_rows_that_are_overwritten_are_counted(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    memory, count = memory_of(table), table._ring.count
    assert steps(memory) == [0]
    for step in range(1, count + 24):
        table.append([step, 0.5, "a"])
    taken = memory.take(ALL, 100_000)
    assert (len(taken.rows), taken.lost) == (count, 23)
    assert taken.rows[":step"][-1] == count + 23
    # What was overwritten before anybody read is no loss.
    assert memory_of(table).take(ALL, 100_000).lost == 0
    assert memory_of(table, position=5).take(ALL, 100_000).lost == 20


def test_a_row_that_is_being_written_waits_and_a_hole_does_not_stay(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    memory, ring = memory_of(table), table._ring
    assert steps(memory) == [0]
    # A thread takes number 2 and does not write; others go on.
    assert next(ring.numbers) == 2
    table.append([2, 0.5, "a"])
    table.append([3, 0.5, "a"])
    assert steps(memory) == []
    taken = memory.take(ALL, 100)
    assert (taken.rows[":step"].tolist(), taken.lost) == ([2, 3], 1)
    # The head of a row without its end.
    place = written.HEADER_BYTES + 5 % ring.count * ring.row.size
    struct.pack_into("<Q", ring.memory, place, next(ring.numbers))
    assert steps(memory) == []


def test_rows_that_are_too_new_wait(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    memory = memory_of(table)
    written_ns = int(memory_of(table).take(ALL, 1).rows["mono_ns"][0])
    assert len(memory.take(written_ns, 10).rows) == 0
    assert len(memory.take(written_ns + 1, 10).rows) == 1


def test_a_column_that_changes_its_type_goes_on_in_other_memory(table: probing.ExternalTable) -> None:
    table.append([1, 2, "a"])
    first = memory_of(table)
    table.append([2, 2.5, "a"])
    table.append([3, None, None])
    second = memory_of(table)
    assert (first.columns["loss"], second.columns["loss"]) == ("i64", "f64")
    assert (steps(first), steps(second)) == ([1], [2, 3])
    table.append([4, "nan?", "a"])
    assert memory_of(table).columns["loss"] == "text"
    assert table.refused == 0
    assert [values for _, values in table.take()] == [[1, 2, "a"], [2, 2.5, "a"], [3, None, None], [4, "nan?", "a"]]


def test_threads_write_every_row(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    memory = memory_of(table)
    threads = [
        threading.Thread(target=lambda own=own: [table.append([own * 1000 + i, 0.5, "a"]) for i in range(101)])
        for own in range(1, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps(memory)) == [0, *(own * 1000 + i for own in range(1, 8) for i in range(101))]


def test_a_child_writes_to_memory_of_its_own(table: probing.ExternalTable) -> None:
    table.append([0, 0.5, "a"])
    ours = table._ring.fd, os.fstat(table._ring.fd).st_ino
    reading, writing = os.pipe()
    if not (child := os.fork()):
        table.append([1, 0.5, "a"])
        os.write(writing, json.dumps([os.fstat(table._ring.fd).st_ino, len(table.take())]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    inode, rows = json.loads(os.read(reading, 100))
    assert inode != ours[1]
    assert rows == 1
    assert steps(RowMemory(ours[0])) == [0]
    os.close(reading)
    os.close(writing)


def sealed(data: bytes, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("probing-rows", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def described(value: Any, slot: int = 40, count: int = 7, size: int = 8192 + 7 * 40) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = struct.pack("<8sIII", b"PRBROWS1", slot, count, len(text)) + text
    return head.ljust(size, b"\0")


GOOD = {"table": "t", "columns": [["a", "i64", 8]]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 9000,
        described(GOOD, slot=41),
        described(GOOD, count=0),
        described(GOOD, count=8),
        described(GOOD, size=(2 << 20) + 1),
        described(b"{"),
        described(b"[" * 7000),
        described({"table": "T; DROP", "columns": [["a", "i64", 8]]}),
        described({"table": "t", "columns": [["a\x1b", "i64", 8]]}),
        described({"table": "t", "columns": [["a", "i64", 8], ["a", "i64", 8]]}, slot=48),
        described({"table": "t", "columns": [["a", "text", 1 << 30]]}),
        described(b'{"table": "t", "columns": [["a", "i64", 1e999]]}'),
        described({"table": "t", "columns": [["a", "object", 8]]}),
        described({"table": "t", "columns": []}),
        struct.pack("<8sIII", b"PRBROWS1", 40, 7, 1 << 31).ljust(9000, b"\0"),
    ],
)
def test_memory_that_is_no_table_is_refused(data: bytes) -> None:
    fd = sealed(data)
    with pytest.raises(FormatError):
        RowMemory(fd)
    os.close(fd)


def test_memory_that_can_shrink_is_refused() -> None:
    fd = sealed(described(GOOD), seals=0)
    with pytest.raises(FormatError, match="not sealed"):
        RowMemory(fd)
    os.close(fd)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=0, max_size=7 * 40), min_size=1, max_size=4))
def test_random_bytes_do_no_harm(contents: list[bytes]) -> None:
    fd = sealed(described(GOOD))
    memory, bytes_of_job = RowMemory(fd), mmap.mmap(fd, 0)
    seen: list[int] = []
    for content in contents:
        bytes_of_job[8192 : 8192 + len(content)] = content
        taken = memory.take(ALL, 5)
        assert len(taken.rows) <= 5
        assert taken.lost >= 0
        numbers = taken.rows["number"].tolist()
        assert numbers == sorted(numbers)
        assert not seen or not numbers or numbers[0] > seen[-1]
        seen += numbers
    os.close(fd)


def test_pages_that_a_job_left_out_take_no_memory_of_the_daemon() -> None:
    # GIVEN a table with holes in place of all rows but two
    fd = sealed(described(GOOD, count=7_000, size=8192 + 7_000 * 40), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    libc = ctypes.CDLL(None, use_errno=True)
    # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: the seals allow it.
    assert libc.fallocate(fd, 3, ctypes.c_long(8192), ctypes.c_long(7_000 * 40)) == 0
    for number in (5, 6_999):
        os.pwrite(fd, struct.pack("<QqqqQ", number, 1, 0, 7 * number, number), 8192 + number * 40)
    blocks = os.fstat(fd).st_blocks
    memory = RowMemory(fd)
    # WHEN all of its slots are read
    assert [steps_of(memory) for _ in range(3)] == [[], [35, 48_993], []]
    # THEN the kernel made no pages for that, with which it would charge the daemon
    assert os.fstat(fd).st_blocks == blocks
    os.close(fd)


def steps_of(memory: RowMemory) -> list[int]:
    return memory.take(ALL, 100_000).rows[":a"].tolist()


def test_a_table_that_is_made_again_keeps_little_memory() -> None:
    def memories() -> dict[int, int]:
        """By inode, a descriptor of each memory of a table."""
        fds = (int(path.name) for path in Path("/proc/self/fd").iterdir())
        return {os.fstat(fd).st_ino: fd for fd in fds if written.MEMORY_NAME in name_of(fd)}

    def name_of(fd: int) -> str:
        try:
            return str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:
            return ""

    before = memories()
    for number in range(40):
        table = probing.ExternalTable("again", ["step"])
        assert table.take() == []
        table.append([number])
    own = [fd for inode, fd in memories().items() if inode not in before]
    # The daemon may still read the rows of the last ones.
    assert sorted(step for fd in own for step in steps(RowMemory(fd))) == [35, 36, 37, 38, 39]
    probing.ExternalTable.drop("again")
    assert memories().keys() == before.keys()
