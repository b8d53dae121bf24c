"""The collectives of JAX on CPUs, by a double with the symbols and the calling convention of jaxlib."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collectives_support import JOBS, Watcher, both_ways
from waiting import until

from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.operations.source import OBJECTS
from probing.daemon.source import Identity

DOUBLE = Path(__file__).parents[1] / "doubles" / "jax_gloo.cpp"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-omit-frame-pointer", "-fno-shrink-wrap", "-Wall", "-Wextra")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE = range(5)
F32, BF16, S64 = 11, 16, 5
Row = dict[str, Any]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libjax_common.so"
    subprocess.run(["g++", *FLAGS, "-Werror", "-o", path, DOUBLE], check=True)
    return path


class Ranks:
    """Processes that call the double; ``Processes`` of themselves."""

    def __init__(self, library: Path, size: int = 2) -> None:
        command = [sys.executable, JOBS / "jax_calls.py", library]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [subprocess.Popen(command, **pipes) for _ in range(size)]
        for rank in self.ranks:
            assert rank.stdout
            assert rank.stdout.readline() == "ready\n"

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        rank = next((n for n, process in enumerate(self.ranks) if process.pid == pid), None)
        return None if rank is None else Identity(pid, start_ns, "job0", "run", "trainer", rank, rank, 2, 0)

    def do(self, rank: int, command: str, times: int = 1) -> None:
        process = self.ranks[rank]
        assert process.stdin
        assert process.stdout
        for _ in range(times):
            process.stdin.write(command + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

    def create(self, name: str, first: int, count: int) -> None:
        for rank in range(len(self.ranks)):
            self.do(rank, f"create {name} {first} {count} {rank}")

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def ranks(library: Path) -> Iterator[Ranks]:
    started = Ranks(library)
    yield started
    started.close()


@pytest.fixture
def watch(open_session: Callable[..., Session], ranks: Ranks, library: Path) -> Callable[[], Watcher]:
    def begin() -> Watcher:
        watcher = Watcher(open_session(*OBJECTS), ranks)
        watcher.attach(library)
        return watcher

    return begin


def call(name: str, operation: int, dtype: int = F32, count: int = 7, kind: int = 0, us: int = 0) -> str:
    return f"call {name} {operation} {dtype} {count} {kind} {us}"


@both_ways
def test_each_operation_is_seen_once_with_its_arguments(watch: Callable[[], Watcher], ranks: Ranks) -> None:
    watcher = watch()
    ranks.create("world", 0, 2)
    for rank in range(2):
        ranks.do(rank, call("world", ALL_REDUCE), 23)
        ranks.do(rank, call("world", ALL_GATHER, BF16, 5), 7)
        ranks.do(rank, call("world", REDUCE_SCATTER, S64, 3, kind=3), 5)
        ranks.do(rank, call("world", ALL_TO_ALL, F32, 3), 3)
        ranks.do(rank, call("world", PERMUTE, 255, 11), 2)
    rows = watcher.rows()
    arguments = Counter(
        (row["rank"], row["op"], row["dtype"], row["count"], row["bytes"], row["redop"]) for row in rows
    )
    # Of reduce_scatter and all_to_all a rank contributes a block for each rank.
    expected = {
        ("all_reduce", "float32", 7, 28, "sum"): 23,
        ("all_gather", "bfloat16", 5, 10, None): 7,
        ("reduce_scatter", "int64", 6, 48, "max"): 5,
        ("all_to_all", "float32", 6, 24, None): 3,
        ("collective_permute", None, 11, None, None): 2,
    }
    assert arguments == {(rank, *key): count for key, count in expected.items() for rank in range(2)}
    for rank in range(2):
        assert [row["seq"] for row in rows if row["rank"] == rank] == list(range(40))
    assert {(row["rank"], row["comm_rank"], row["comm_size"]) for row in rows} == {(0, 0, 2), (1, 1, 2)}
    assert {(row["backend"], row["state"], row["timing_source"], row["async_op"]) for row in rows} == {
        ("gloo", "done", "exact", False)
    }
    assert len({row["comm"] for row in rows}) == 1
    assert watcher.inflight() == []
    assert watcher.session.counters()["collectives"]["lost"] == 0


def test_communicators_of_equal_devices_have_one_name_on_all_ranks(watch: Callable[[], Watcher], ranks: Ranks) -> None:
    watcher = watch()
    for name, first, count in (("world", 0, 2), ("far", 2048, 2), ("large", 0, 500)):
        ranks.create(name, first, count)
        for rank in range(2):
            ranks.do(rank, call(name, ALL_REDUCE))
    rows = watcher.rows()
    by_size = {rank: [row["comm"] for row in rows if row["rank"] == rank] for rank in range(2)}
    assert by_size[0] == by_size[1]
    assert len(set(by_size[0])) == 3
    assert [row["comm_size"] for row in rows if row["rank"] == 0] == [2, 2, 500]


def test_a_communicator_from_before_the_probes_has_no_name(watch: Callable[[], Watcher], ranks: Ranks) -> None:
    ranks.create("world", 0, 2)
    watcher = watch()
    ranks.do(1, call("world", ALL_REDUCE))
    (row,) = watcher.rows()
    assert (row["comm"], row["seq"], row["comm_rank"], row["comm_size"]) == (None, None, 1, 2)


def test_an_operation_is_in_flight_until_it_returns(watch: Callable[[], Watcher], ranks: Ranks) -> None:
    watcher = watch()
    ranks.create("world", 0, 2)
    ranks.do(0, f"begin world {ALL_REDUCE} {F32} 7 0 500000000")
    ranks.do(0, call("world", ALL_GATHER, us=23))
    (row,) = watcher.wait_for_open(1)
    assert (row["op"], row["state"], row["rank"]) == ("all_reduce", "started", 0)
    assert row["tid"] != ranks.ranks[0].pid
    (done,) = watcher.rows()
    assert (done["op"], done["tid"]) == ("all_gather", ranks.ranks[0].pid)
    assert done["done_hi_ns"] >= 23_000
    ranks.ranks[0].kill()
    ranks.ranks[0].wait()
    assert watcher.source.close_ended(lambda pid, _: pid != ranks.ranks[0].pid) == 1
    assert until(lambda: [row["state"] for row in watcher.rows() if row["op"] == "all_reduce"]) == ["abandoned"]


@pytest.mark.parametrize("place", ["2 2", "7 5", f"{1 << 63} {(1 << 64) - 1}", f"0 {1 << 40}", "0 0"])
def test_a_communicator_with_an_impossible_rank_has_none(
    watch: Callable[[], Watcher], ranks: Ranks, place: str
) -> None:
    watcher = watch()
    ranks.create("world", 0, 2)
    ranks.do(0, f"break world {place}")
    ranks.do(0, call("world", REDUCE_SCATTER, 99, 1 << 62, kind=77))
    (row,) = watcher.rows()
    assert (row["comm_rank"], row["comm_size"], row["dtype"], row["redop"], row["count"]) == (None,) * 5
    assert row["op"] == "reduce_scatter"
