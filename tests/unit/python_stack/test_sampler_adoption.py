"""Threads that are off the CPU before the sampler starts: listed, registered, and removed when they have run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.api.errors import InternalError, TargetTimeout, UsageError
from probing.daemon.ipc import Message
from probing.daemon.python_stack.sampling.adoption import Adopted, Adoption
from probing.daemon.python_stack.sampling.off_cpu.kernel_entries import frames_hash
from probing.daemon.python_stack.sampling.off_cpu.stacks import (
    MAX_BLOCKED,
    OffCpuThread,
    answer_blocked,
    unpack_blocked,
)
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.threads import read_start_ns

RUNTIME = RuntimeInfo(4096, 8192, 0x030B07F0, (3, 11), "3.11.7", "python3.11")
THREADS = {tid: (tid * 4096, tid * 8) for tid in (2, 3)}


class World:
    """A kernel and readers. ``away``: tid -> switches of threads that do not run; ``code``: what can be read."""

    def __init__(self) -> None:
        self.away = {2: 20, 3: 30}
        self.code = {100: 1, 101: 2}
        self.now = 1_000
        self.places, self.room = 10, (100, 10)
        self.generation = 7
        self.entries: dict[int, OffCpuThread] = {}
        self.asked: list[tuple[bool, list[int]]] = []
        self.runs_then: dict[int, int] = {}
        self.fails_at = -1
        self.adoption = Adoption(self, threading.Lock(), self, self.checks)

    def lacking(self, start_ns: int, tids: Iterable[int]) -> tuple[int, list[int]]:
        return self.generation, [tid for tid in tids if tid not in self.entries]

    def adopt(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[OffCpuThread], checks: Mapping[int, int]
    ) -> tuple[list[OffCpuThread], int]:
        assert generation == self.generation
        made = list(threads)[: self.places]
        self.entries |= {away.tid: away for away in made}
        self.away |= self.runs_then
        return made, len(threads) - len(made)

    def disown(self, tid: int, switches: int) -> None:
        assert self.entries.pop(tid).switches == switches

    def checks(self, process: Sampled, addresses: Sequence[int]) -> dict[int, int]:
        return {address: self.code[address] for address in addresses if address in self.code}

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        assert (op, args["runtime"]) == ("blocked", RUNTIME.to_dict())
        if len(self.asked) == self.fails_at:
            raise TargetTimeout("slow")
        tids = [tid for tid, state, thread_id in args["threads"] if THREADS.get(tid, (state, thread_id))[0] == state]
        self.asked.append((args["frames"], tids))
        self.now += 1_000
        frames = [[100, 4], [101, -8]] if args["frames"] else []
        rows = [[tid, self.away[tid], self.now, False, frames] for tid in tids if tid in self.away]
        return Message({}, json.dumps(rows).encode())

    def visit(self, before: Adopted | None = None, threads: Mapping[int, tuple[int, int]] = THREADS) -> Adopted:
        return self.adoption.visit(Sampled((2, 5)), RUNTIME, threads, before or Adopted())


def test_threads_off_the_cpu_are_registered_once() -> None:
    world = World()
    assert world.visit(threads={**THREADS, 9: (0, 0)}) == Adopted()
    assert world.asked == [(True, [2, 3]), (False, [2, 3])]
    assert world.entries[3] == OffCpuThread(3, 30, 2_000, False, [(100, 4), (101, -8)])
    world.visit()
    assert len(world.asked) == 2


def test_one_that_ran_meanwhile_is_not_registered() -> None:
    world = World()
    world.runs_then = {2: 21}
    world.visit()
    assert list(world.entries) == [3]


def test_one_that_may_have_run_is_not_registered() -> None:
    world = World()
    world.fails_at = 1
    assert world.visit() == Adopted()
    assert world.entries == {}


def test_code_that_cannot_be_read_is_tried_again_and_the_time_until_then_counts() -> None:
    world = World()
    del world.code[101]
    before = world.visit()
    assert (before.left, world.entries) == ({2: (7, 20, 2_000), 3: (7, 30, 2_000)}, {})
    world.code[101], world.away[3] = 2, 31
    assert world.visit(before).left == {}
    assert {tid: away.seen_ns for tid, away in world.entries.items()} == {2: 2_000, 3: 3_000}


def test_time_before_a_pause_does_not_count() -> None:
    world = World()
    del world.code[101]
    before = world.visit()
    world.code[101], world.generation = 2, 8
    world.visit(before)
    assert {away.seen_ns for away in world.entries.values()} == {3_000}


def test_those_without_room_are_counted_and_tried_again() -> None:
    world = World()
    world.places = 1
    found = world.visit()
    assert (found.no_room, found.left, list(world.entries)) == (1, {3: (7, 30, 2_000)}, [2])


def test_a_slow_process_is_left_for_the_next_time() -> None:
    world = World()
    world.fails_at = 0
    before = Adopted({2: (7, 20, 500)})
    assert world.visit(before).left == before.left
    world.fails_at = -1
    world.visit(before)
    assert world.entries[2].seen_ns == 500


def test_many_threads_are_asked_for_in_parts() -> None:
    world = World()
    world.visit(threads=dict.fromkeys(range(10, 11 + MAX_BLOCKED), (1, 1)))
    assert [len(tids) for _, tids in world.asked] == [MAX_BLOCKED, 1]


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_any_answer_is_threads_or_an_error(payload: bytes) -> None:
    try:
        found = unpack_blocked(Message({}, payload))
    except InternalError:
        return
    assert all(isinstance(away, OffCpuThread) for away in found)


@pytest.mark.parametrize("threads", [None, 7, [7], [[1, 2]], [[1, 2, "x"]], [[1, 2, 3]] * (MAX_BLOCKED + 1)])
def test_requests_are_checked(threads: Any) -> None:
    request = {"pid": 1, "start_ns": read_start_ns(1), "runtime": RUNTIME.to_dict(), "threads": threads}
    with pytest.raises(UsageError):
        answer_blocked(request)


def test_equal_frames_have_equal_hashes() -> None:
    """That it is the kernel's is shown with the real programs."""
    one = frames_hash([(100, 1), (101, 2)], [4, -8])
    assert one == frames_hash([(100, 1), (101, 2)], [4, -8])
    assert one != frames_hash([(100, 1), (101, 2)], [4, 8])
    assert 0 <= one < 1 << 64


def test_a_process_adopts_no_more_than_its_share() -> None:
    world = World()
    world.room = (100, 1)
    adopted = world.visit()
    assert (list(world.entries), adopted.no_room) == ([2], 1)
    adopted = world.visit(before=adopted)
    assert (list(world.entries), adopted.no_room) == ([2], 1)
