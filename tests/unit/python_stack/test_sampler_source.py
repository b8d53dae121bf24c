"""Which processes are sampled, how often, and what the programs know of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import Processes, Sink
from sampler_records import SLOT, START, FakeRing, code, record

from probing.api.errors import NotPython, ProbingError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.clock import ClockPair
from probing.daemon.ipc import Message
from probing.daemon.python_stack.sampling import processes as sampled_processes
from probing.daemon.python_stack.sampling.codes import code_check
from probing.daemon.python_stack.sampling.off_cpu.stacks import OffCpuThread
from probing.daemon.python_stack.sampling.processes import KnownProcesses
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.walk.layouts import TABLE, Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.source import Identity

Until = Callable[..., Any]
PAIR = ClockPair(mono_ns=10**15, boot_ns=10**15, real_ns=1_700_000_000_000_000_000)
RUNTIME = RuntimeInfo(4096, 8192, 0x030B07F0, (3, 11), "3.11.7", "python3.11")
PROOF = (16, 32, 48, 7, 5)


def who(pid: int, role: str = "trainer", job: str = "job") -> Identity:
    return Identity(pid, START, job, "run", role, rank=pid)


class FakeKernel:
    """What the programs know now: ``told`` [pid] is (rate, off_rate, gil), ``threads`` [pid] its threads."""

    def __init__(self, ring: FakeRing) -> None:
        self.ring = ring
        self.told: dict[int, tuple[int, int, int]] = {}
        self.threads: dict[int, Mapping[int, tuple[int, int]]] = {}
        self.clock = (0, False)
        self.room = (100, 10)
        self.no_room = 0
        self.refuses: ProbingError | None = None
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def add(
        self,
        pid: int,
        start_ns: int,
        layout: Layout,
        runtime: RuntimeInfo,
        gil: int,
        rate: int,
        off_rate: int,
        owner: int,
    ) -> None:
        del owner
        assert (start_ns, layout, runtime) == (START, TABLE[3, 11], RUNTIME)
        if self.refuses is not None:
            raise self.refuses
        self.told[pid] = (rate, off_rate, gil)

    def set_rate(self, pid: int, start_ns: int, rate: int, off_rate: int) -> None:
        self.told[pid] = (rate, off_rate, self.told[pid][2])

    def set_threads(self, pid: int, start_ns: int, threads: Mapping[int, tuple[int, int]]) -> int:
        self.threads[pid] = threads
        return self.no_room

    def lacking(self, start_ns: int, tids: Iterable[int]) -> tuple[int, list[int]]:
        # As where nobody sees threads switch.
        return 0, []

    def adopt(
        self, pid: int, start_ns: int, generation: int, threads: Sequence[OffCpuThread], checks: Mapping[int, int]
    ) -> tuple[list[OffCpuThread], int]:
        raise AssertionError("no thread is away")

    def disown(self, tid: int, switches: int) -> None:
        raise AssertionError("no thread is away")

    def remove(self, pid: int, start_ns: int) -> None:
        self.told.pop(pid, None)
        self.threads.pop(pid, None)

    def clear(self) -> None:
        self.told.clear()
        self.threads.clear()

    def set_clock(self, hz: int, off_cpu: bool) -> None:
        self.clock = (hz, off_cpu)


class SampledReaders:
    """Readers of processes that are all alike, but for ``more_threads``. ``scans`` counts the reads of threads."""

    def __init__(self) -> None:
        self.scans = 0
        self.more_threads: dict[int, tuple[int, int]] = {}

    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        assert args["runtime"] == RUNTIME.to_dict()
        if op == "threads":
            self.scans += 1
            threads = {pid: (pid * 4096, pid * 8), **self.more_threads}
            found = [[tid, *state, f"thread {tid}"] for tid, state in threads.items()]
            return Message({"threads": found, "gil": 77, "complete": True})
        assert op == "codes"
        # Only half of what is asked for is looked at.
        asked = args["wanted"][: (len(args["wanted"]) + 1) // 2]
        codes = [[a, PROOF, f"f{a}", 0, 2] for a, _ in asked if a < 1 << 20]
        index = json.dumps({"files": ["a.py"], "codes": codes}).encode()
        return Message({"index": len(index), "asked": len(asked)}, index + b"\x80\x00" * len(codes))


class SampledRuntimes:
    """The same CPython in every process, but for ``errors``, which are by pid."""

    def __init__(self) -> None:
        self.errors: dict[int, ProbingError] = {}
        self.forgotten: list[int] = []

    def prepare(self, pid: int, start_ns: int, timeout: float) -> RuntimeInfo:
        if pid in self.errors:
            raise self.errors[pid]
        return RUNTIME

    def layout(self, pid: int, start_ns: int, timeout: float) -> Layout:
        return TABLE[3, 11]

    def forget(self, pid: int, start_ns: int) -> None:
        self.forgotten.append(pid)


class World:
    """A sampler and the doubles that it was built with. ``jobs``: (rate, off the CPU too), by job."""

    def __init__(self, ring: FakeRing) -> None:
        self.kernel = FakeKernel(ring)
        self.readers = SampledReaders()
        self.runtimes = SampledRuntimes()
        self.jobs: dict[str, tuple[int, bool]] = {}
        # Rows go back to the drain.
        self.sink = Sink("")
        trainers = Processes(identify=lambda pid, _: who(pid))
        self.sampler = PythonSampler(self.kernel, self.readers, self.runtimes, trainers, self.sink, "n1", self.settings)

    def settings(self, identity: Identity) -> tuple[int, bool]:
        return self.jobs.get(identity.job, (19, True))


@pytest.fixture
def ring() -> Iterator[FakeRing]:
    found = FakeRing()
    yield found
    found.close()


@pytest.fixture
def world(ring: FakeRing) -> Iterator[World]:
    found = World(ring)
    found.sampler.start()
    yield found
    found.sampler.stop()


def test_trainers_and_their_loaders_are_sampled(world: World, until: Until) -> None:
    for pid, role in ((2, "trainer"), (3, "data_loader"), (4, "launcher"), (5, "other")):
        world.sampler.process_identified(who(pid, role))
    until(lambda: world.kernel.told == {2: (19, 50, 77), 3: (19, 50, 77)})
    until(lambda: world.kernel.threads == {pid: {pid: (pid * 4096, pid * 8)} for pid in (2, 3)})
    until(lambda: world.kernel.clock == (19, True))
    assert (world.sampler.sampled, world.sampler.reason) == (2, "")


def test_the_clock_is_as_fast_as_the_fastest(world: World, until: Until) -> None:
    world.jobs = {"a": (7, False), "b": (99, False)}
    for pid, job in ((2, "a"), (3, "b")):
        world.sampler.process_identified(who(pid, job=job))
    until(lambda: world.kernel.told == {2: (7, 0, 77), 3: (99, 0, 77)} and world.kernel.clock == (99, False))
    world.sampler.process_exited(who(3, job="b"))
    until(lambda: world.kernel.told == {2: (7, 0, 77)} and world.kernel.clock == (7, False))


def test_settings_change_at_run_time(world: World, until: Until) -> None:
    world.sampler.process_identified(who(2))
    until(lambda: world.kernel.clock == (19, True))
    world.jobs = {"job": (0, True)}
    world.sampler.settings_changed()
    until(lambda: world.kernel.told == {} and world.kernel.clock == (0, False))
    world.jobs = {"job": (99, False)}
    world.sampler.settings_changed()
    until(lambda: world.kernel.told == {2: (99, 0, 77)} and world.kernel.clock == (99, False))
    assert world.kernel.threads[2]


def test_a_process_that_calls_exec_is_looked_at_anew(world: World, until: Until) -> None:
    """Its exec can be reported after its identity, which is not reported again."""
    world.sampler.process_identified(who(2))
    until(lambda: 2 in world.kernel.threads)
    world.runtimes.errors[2] = NotPython("process 2 runs no CPython")
    world.sampler.process_replaced(2, START)
    until(lambda: world.sampler.reason)
    del world.runtimes.errors[2]
    world.sampler.process_replaced(2, START)
    until(lambda: world.sampler.sampled == 1)
    world.sampler.process_identified(who(2, "other"))
    until(lambda: world.kernel.told == {})


def test_a_main_thread_without_a_state_is_not_registered(world: World, until: Until) -> None:
    """Its interpreter is only starting: the next sample of it has the process scanned again."""
    world.readers.more_threads = {3: (0, 0), 2: (0, 0)}
    world.sampler.process_identified(who(2))
    until(lambda: world.kernel.threads.get(2) == {3: (0, 0)})


def test_an_unknown_thread_has_its_process_scanned(world: World, ring: FakeRing, until: Until) -> None:
    world.sampler.process_identified(who(2))
    until(lambda: 2 in world.kernel.threads)
    world.readers.more_threads = {9: (1, 2)}
    ring.push(record(kind=3, tid=9), record(kind=3, tgid=1234))
    until(lambda: 9 in world.kernel.threads[2])


def test_why_a_process_is_not_sampled_is_reported(world: World, until: Until) -> None:
    for pid, error in ((2, UnsupportedTarget("CPython 3.7 is not known")), (3, TargetTimeout("process 3 was slow"))):
        world.runtimes.errors |= {pid: error, pid + 10: type(error)(error.message.replace(f" {pid} ", f" {pid + 10} "))}
        for same in (pid, pid + 10):
            world.sampler.process_identified(who(same))
    world.runtimes.errors[5] = ProcessGone("process 5 exited")
    world.sampler.process_identified(who(5))
    told = {"CPython 3.7 is not known: pid 2, 12", "a process was slow: pid 3, 13"}
    until(lambda: set(world.sampler.reason.split("; ")) == told)
    world.runtimes.errors.clear()
    until(lambda: world.sampler.sampled == 5 and not world.sampler.reason)


def test_programs_that_have_no_room_are_a_reason(world: World, until: Until) -> None:
    world.kernel.refuses = UnsupportedTarget("no room")
    world.sampler.process_identified(who(2))
    until(lambda: world.sampler.reason == "no room: pid 2")
    assert world.kernel.clock == (0, False)


def test_threads_for_which_there_is_no_room_are_a_loss(world: World, until: Until) -> None:
    world.kernel.no_room = 3
    world.sampler.process_identified(who(2))
    until(lambda: world.sink.losses)
    (loss,) = world.sink.losses
    reason = "no room in the map for 3 threads: a process may have 100, and its user a share of all threads"
    assert (loss.stage, loss.reason, loss.pid) == ("resolve", reason, 2)
    assert loss.ts_from_ns <= loss.ts_to_ns


def test_samples_become_rows_with_their_code(world: World, ring: FakeRing, until: Until) -> None:
    world.sampler.process_identified(who(2))
    until(lambda: 2 in world.kernel.threads)
    check = code_check(*PROOF)
    records = [record((4096, 0, check), (8192, 0, check), (16384, 0, check)), record((1 << 30, 0, check))]
    ring.push(*records)
    until(lambda: world.sampler.ready() == 2 * SLOT)
    batches = world.sampler.assemble(np.concatenate(records), PAIR)
    rows = batches["python.samples"].drop_columns(["ts"]).to_pylist()
    assert {row["thread"] for row in rows} == {"thread 2"}
    stacks = batches["python.stacks"].drop_columns(["ts"]).to_pylist()
    assert {tuple(frame["func"] for frame in row["frames"]) for row in stacks} == {("f4096", "f8192", "f16384"), ("?",)}
    assert [(loss.stage, loss.count) for loss in world.sink.losses] == [("decode", 1)]


def test_what_is_left_of_a_process_that_ended_is_decoded(world: World, ring: FakeRing, until: Until) -> None:
    world.sampler.process_identified(who(2))
    until(lambda: 2 in world.kernel.threads)
    found = record((4096, 0, code_check(*PROOF)))
    ring.push(found)
    until(lambda: world.sampler.ready() == SLOT)
    world.runtimes.errors[2] = ProcessGone("process 2 exited")
    world.sampler.process_exited(who(2))
    until(lambda: not world.kernel.told)
    (row,) = world.sampler.assemble(found, PAIR)["python.stacks"].drop_columns(["ts"]).to_pylist()
    assert row["frames"] == [{"func": "f4096", "file": "a.py", "lineno": 7}]
    assert world.sink.losses == []


def test_it_can_be_started_again(world: World, until: Until) -> None:
    world.sampler.process_identified(who(2))
    until(lambda: world.kernel.clock == (19, True))
    world.sampler.stop()
    assert (world.kernel.told, world.kernel.clock) == ({}, (0, False))
    world.sampler.start()
    until(lambda: 2 in world.kernel.threads and world.kernel.clock == (19, True))


def test_the_dead_are_forgotten_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownProcesses(world)
    alive = {pid: known.find((pid, START)) for pid in range(3)}
    for pid in alive:
        known.started((pid, START))
    known.ended((2, START))
    assert known.find((2, START)) is alive[2]
    for pid in range(10, 10 + sampled_processes.MAX_ENDED):
        known.find((pid, START))
    assert [known.find((pid, START)) is found for pid, found in alive.items()] == [True, True, False]
    monkeypatch.setattr(sampled_processes, "ENDED_S", 0.0)
    later = known.find((11, START))
    known.ended((0, START))
    assert known.find((11, START)) is not later
    assert known.find((1, START)) is alive[1]


def test_the_code_of_a_user_with_many_processes_takes_the_room_of_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, one = code("f" * 1_000)
    monkeypatch.setattr(sampled_processes, "MAX_BYTES", 10_000)
    known = KnownProcesses(world)
    mine = known.find((1, START))
    known.started((1, START))
    mine.identity = who(1)._replace(owner=1000)
    mine.codes.learn({(n, check): one for n in range(3)})
    theirs = {pid: known.find((pid, START)) for pid in range(2, 20)}
    for pid, process in theirs.items():
        if pid % 2:
            known.started((pid, START))
        process.identity = who(pid)._replace(owner=1001)
        process.codes.learn({(n, check): one for n in range(2 if pid == 3 else 1)})
        known.bound()
    assert mine.codes.get((2, check)) is one
    # Code of processes that ended went first, and then that of the process with most of it.
    kept = [pid for pid, process in theirs.items() if process.codes.get((0, check))]
    assert [pid for pid in kept if not pid % 2] in ([], [18])
    assert 3 not in kept
    assert sum(process.codes.bytes for process in (mine, *theirs.values())) <= 10_000


def test_code_that_was_read_makes_room_for_itself(
    world: World, ring: FakeRing, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded: list[KnownProcesses] = []
    monkeypatch.setattr(KnownProcesses, "bound", lambda known: bounded.append(known))
    world.sampler.process_identified(who(2))
    until(lambda: 2 in world.kernel.threads)
    ring.push(record((4096, 0, code_check(*PROOF))))
    until(lambda: world.sampler.ready() == SLOT)
    assert bounded
