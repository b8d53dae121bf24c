"""Which thread trains: the one that issues most collectives, and the main thread in doubt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from probing.daemon.nccl_uprobes.operations.issuers import CHANGE_S, MAX_CHANGES, MAX_PROCESSES, MAX_THREADS, Issuers
from probing.daemon.source import ProcessKey

DTYPE = [("tgid", np.uint32), ("start_ns", np.uint64), ("tid", np.uint32)]
MAIN, OTHER, THIRD = 7, 23, 29


class World:
    """The threads of process 7, with what is reported of them."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, int, int]] = []
        self.ended: set[int] = set()
        self.now = 1000.0
        self.issuers = Issuers(
            lambda *told: self.reported.append(told), lambda _, tid: tid not in self.ended, lambda: self.now
        )

    def follow(self, *rows: tuple[int, int, int]) -> None:
        self.issuers.follow(np.array(list(rows), DTYPE), dict.fromkeys(ProcessKey(*row[:2]) for row in rows))

    def issue(self, **counts: int) -> list[int]:
        """Operations of the threads, in one drain; returns the threads that are reported of it."""
        tids = {"main": MAIN, "other": OTHER, "third": THIRD}
        rows = [(MAIN, 5, tids[name]) for name, count in counts.items() for _ in range(count)]
        before = len(self.reported)
        self.follow(*rows)
        assert all(told[:2] == (MAIN, 5) for told in self.reported)
        return [tid for _, _, tid in self.reported[before:]]


@pytest.fixture
def world() -> World:
    return World()


def test_a_main_thread_that_issues_all_is_not_reported(world: World) -> None:
    assert world.issue(main=23) == []
    assert world.issue() == []


def test_another_thread_that_issues_all_is_reported_once(world: World) -> None:
    assert world.issue(other=5) == [OTHER]
    assert world.issue(other=7) == []


def test_the_main_thread_goes_before_one_that_issues_less(world: World) -> None:
    world.issue(main=23)
    # A thread beside the training, for a while.
    assert world.issue(other=500) == []
    assert world.issue(main=7, other=5) == []
    assert world.issue(main=500) == []
    # And one that takes over for good.
    assert [tid for _ in range(7) for tid in world.issue(other=500)] == [OTHER]
    assert [tid for _ in range(7) for tid in world.issue(main=500)] == [MAIN]


def test_of_two_threads_at_once_the_main_one_goes_first(world: World) -> None:
    assert world.issue(main=7, other=7) == []
    assert world.issue(other=1) == [OTHER]


def test_a_thread_that_has_ended_gives_way_at_once(world: World) -> None:
    assert world.issue(other=5000) == [OTHER]
    world.ended.add(OTHER)
    assert world.issue(third=1) == [THIRD]


def test_long_ago_counts_less(world: World) -> None:
    for _ in range(1000):
        world.issue(other=1000)
    assert THIRD in [tid for _ in range(7) for tid in world.issue(third=1000)]


def test_threads_that_take_turns_are_reported_more_and_more_rarely(world: World) -> None:
    def take_turns(times: int) -> int:
        before = len(world.reported)
        for n in range(times):
            world.ended = {OTHER} if n % 2 else {THIRD}
            world.issue(**({"third": 2000} if n % 2 else {"other": 2000}))
        return len(world.reported) - before

    assert take_turns(100) == MAX_CHANGES
    # A process may start a thread for each run of its training, for days: the newest one is still known.
    for _ in range(3):
        world.now += CHANGE_S
        assert take_turns(100) == 1


def test_a_process_with_threads_makes_no_work_of_the_records_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def stacked(columns: list[Any]) -> Any:
        counted.append(len(columns[0]))
        return stack(columns)

    stack = np.stack
    monkeypatch.setattr(np, "stack", stacked)
    # GIVEN a process of which another thread issues operations, among many of another process
    others = [(11, 5, 11)] * 1000
    world.follow(*others, (MAIN, 5, OTHER), (MAIN, 5, MAIN))
    world.follow(*others, (MAIN, 5, MAIN))
    # THEN only its own are sorted by thread, and the other process is known by its main thread.
    assert counted == [2, 1]
    assert list(world.issuers._main_alone) == [ProcessKey(11, 5)]


def test_what_is_kept_has_bounds(world: World) -> None:
    rows = [(pid, 1, pid + 1) for pid in range(1, MAX_PROCESSES + 24)]
    world.follow(*rows)
    world.follow(*[(1 << 20, 5, tid) for tid in range(1, 3 * MAX_THREADS)])
    assert len(world.issuers._counts) == MAX_PROCESSES
    assert max(map(len, world.issuers._counts.values())) == MAX_THREADS
    for pid in range(1, MAX_PROCESSES + 24):
        world.follow((pid + (1 << 21), 1, pid + (1 << 21)))
    assert len(world.issuers._main_alone) <= MAX_PROCESSES
    world.issuers.forget(ProcessKey(1 << 20, 5))
    assert len(world.issuers._counts) == MAX_PROCESSES - 1
