"""Threads that were off the CPU before the sampler started: sampled like others, exactly once, and never wrongly."""

from __future__ import annotations

import bisect
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long import long_unless
from python_sampler_support import INTERPRETERS, OFF_CPU, Sampling, Target, check_of, each_interpreter, started

from probing.daemon.bpf import cpu_clock
from probing.daemon.bpf.perf_events import online_cpus
from probing.daemon.bpf.session import Session
from probing.daemon.ipc import Message
from probing.daemon.python_stack.sampling.adoption import Adopted, Adoption
from probing.daemon.python_stack.sampling.off_cpu.kernel_entries import OffCpuEntries
from probing.daemon.python_stack.sampling.off_cpu.stacks import MAX_FRAMES, OffCpuThread, answer_blocked, unpack_blocked
from probing.daemon.python_stack.sampling.processes import Sampled
from probing.daemon.python_stack.sampling.programs import OBJECTS, SamplingPrograms
from probing.daemon.python_stack.walk.codes import read_codes
from probing.daemon.python_stack.walk.snapshot import Snapshot

# Reads a line, then sleeps until it gets another one.
LONG = """
import sys

def sleeps():
    return sys.stdin.readline()

def deep(n):
    while True:
        if n:
            deep(n - 1)
        sleeps()
        print("awake", flush=True)

print("ready", flush=True)
deep({deep})
"""
# Says when it slept in which function; the times are around the sleep.
TURNS = """
import sys, time

def odd():
    time.sleep(0.002)

def even():
    time.sleep(0.003)

log = open(sys.argv[1], "w", buffering=1 << 16)
print("ready", flush=True)
number = 0
while True:
    number += 1
    begin = time.monotonic_ns()
    (odd if number % 2 else even)()
    log.write(f"{begin} {time.monotonic_ns()} {number % 2}\\n")
"""
SECOND = 1_000_000_000
# The number of the system call and its first argument, as /proc shows them.
READS_STDIN = "0 0x0 "


@pytest.fixture
def sampling(pin_root: Path, until: Callable[..., object]) -> Iterator[Sampling]:
    session = Session.open("test", ["python"], pin_root, optional=["python_off"])
    assert session.refused == {}
    made = Sampling(session, until)
    yield made
    made.close()
    session.close(keep=False)


@contextmanager
def asleep(sampling: Sampling, python: str = INTERPRETERS[-1], deep: int = 3) -> Iterator[tuple[Target, OffCpuThread]]:
    """A process whose thread sleeps since before it is sampled, and what a reader says of it."""
    with started(python, LONG.format(deep=deep)) as target:
        # Not before: a wait for a page of a file counts as away, too, and is over soon.
        sampling._until(lambda: Path(f"/proc/{target.pid}/syscall").read_text().startswith(READS_STDIN))
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        [away] = looked(target)
        yield target, away


def looked(target: Target, *, frames: bool = True) -> list[OffCpuThread]:
    threads = [[tid, *known] for tid, known in target.tids().items()]
    request = {"pid": target.pid, "start_ns": target.start_ns, "runtime": target.runtime.to_dict(), "threads": threads}
    return unpack_blocked(answer_blocked({**request, "frames": frames, "timeout_ms": 20_000}))


def put(sampling: Sampling, target: Target, away: OffCpuThread) -> OffCpuEntries:
    threads = OffCpuEntries(sampling.session)
    generation = threads.generation
    assert generation is not None
    checks = {code: check_of(target, code) for code, _ in away.frames}
    assert threads.lacking(target.start_ns, [away.tid]) == [away.tid]
    assert threads.put(target.pid, target.start_ns, generation, [away], checks) == ([away], 0)
    assert threads.lacking(target.start_ns, [away.tid]) == []
    return threads


def wake(target: Target) -> None:
    target.process.stdin.write("on\n")
    target.process.stdin.flush()
    assert target.process.stdout.readline() == "awake\n"


def entry(sampling: Sampling, tid: int) -> Any:
    return sampling.session.maps["python_off"].lookup(tid)


def flush(sampling: Sampling) -> int:
    return sampling.session.run_program("python_off_flush", b"")


def reported(sampling: Sampling, target: Target) -> np.ndarray[Any, Any]:
    found = sampling.samples(target)
    return found[found["kind"] == OFF_CPU]


def monotonic() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@each_interpreter
@pytest.mark.parametrize("deep", [3, 200])
def test_an_entry_is_what_the_kernel_would_have_made(sampling: Sampling, python: str, deep: int) -> None:
    with asleep(sampling, python, deep) as (target, away):
        put(sampling, target, away)
        ours = entry(sampling, away.tid)["sample"]
        wake(target)
        sampling._until(lambda: (e := entry(sampling, away.tid)) is not None and e["switches"] > away.switches)
        # The kernel may have seen it on its way there, too.
        sampling._until(lambda: [now.frames for now in looked(target)] == [away.frames])
        theirs = entry(sampling, away.tid)["sample"]
        assert ours["depth"] == theirs["depth"]
        assert (ours["depth"] > 100) == away.cut == (deep > 100)
        for name in ("start_ns", "tgid", "tid", "kind", "hash"):
            assert ours[name] == theirs[name], name
        assert ours["flags"] & 7 == theirs["flags"] & 3
        depth = int(ours["depth"])
        assert depth <= MAX_FRAMES
        assert ours["frames"][:depth].tolist() == theirs["frames"][:depth].tolist()


def test_an_earlier_sleeper_is_reported_while_it_sleeps_and_when_it_wakes(sampling: Sampling) -> None:
    with asleep(sampling) as (target, away):
        put(sampling, target, away)
        for parts in (1, 2):
            sampling._until(lambda: flush(sampling) == 1)
            assert len(reported(sampling, target)) == parts
        wake(target)
        sampling._until(lambda: len(reported(sampling, target)) >= 3)
        parts = reported(sampling, target)[:3]
        assert int(parts["ktime"][0]) == away.seen_ns
        ends = parts["ktime"] + parts["duration_ns"]
        assert (ends[:2] == parts["ktime"][1:]).all()
        assert 2 * SECOND <= int(parts["duration_ns"].sum()) <= monotonic() - away.seen_ns
        assert len(set(parts["hash"].tolist())) == 1


def test_a_sleeper_that_woke_before_its_registration_is_not_reported(sampling: Sampling) -> None:
    with asleep(sampling) as (target, away):
        old = away._replace(switches=away.switches - 1)
        threads = put(sampling, target, old)
        threads.drop(away.tid, away.switches)
        assert entry(sampling, away.tid) is not None
        wake(target)
        sampling._until(lambda: (e := entry(sampling, away.tid)) is None or e["switches"] > away.switches)
        assert away.seen_ns not in reported(sampling, target)["ktime"].tolist()
        # One that the kernel has made is left alone.
        sampling._until(lambda: entry(sampling, away.tid) is not None)
        generation = threads.generation
        assert generation is not None
        checks = dict.fromkeys((code for code, _ in away.frames), 0)
        assert threads.put(target.pid, target.start_ns, generation, [away], checks) == ([], 0)
        [now] = sampling._until(lambda: looked(target, frames=False))
        threads.drop(away.tid, now.switches)
        assert entry(sampling, away.tid) is None


@pytest.mark.parametrize("flushed", [False, True])
def test_long_waits_count_once(sampling: Sampling, flushed: bool) -> None:
    """And the rest of one that was reported in part, too, however short that is."""
    with asleep(sampling) as (target, away):
        left = weighted(sampling, target, away, 2 * SECOND)
        if flushed:
            assert flush(sampling) == 1
        wake(target)
        parts = sampling.wait(target, 2 if flushed else 1, OFF_CPU)[: 2 if flushed else 1]
        assert int(parts["ktime"][0]) == left
        assert 2 * SECOND <= int(parts["duration_ns"].sum()) <= monotonic() - left


def test_short_waits_stand_for_those_that_were_not_walked(sampling: Sampling) -> None:
    with asleep(sampling) as (target, away):
        left = weighted(sampling, target, away, 0)
        wake(target)
        passed = monotonic() - left
        part = sampling.wait(target, 1, OFF_CPU)[0]
        assert int(part["ktime"]) == left
        away_ns = int(part["duration_ns"])
        assert away_ns <= passed * 1000
        assert passed >= SECOND or away_ns % 1000 == 0


def weighted(sampling: Sampling, target: Target, away: OffCpuThread, age: int) -> int:
    """An entry that stands for 1000 switches, of a thread that left ``age`` ns ago; when that was."""
    put(sampling, target, away)
    changed = entry(sampling, away.tid).copy()
    left = monotonic() - age
    changed["since"] = changed["sample"]["ktime"] = left
    changed["weight"] = 1000
    sampling.session.maps["python_off"].update(away.tid, changed.tobytes())
    return left


def test_a_pause_voids_what_is_put(sampling: Sampling) -> None:
    with asleep(sampling) as (target, away):
        threads = put(sampling, target, away)
        sampling.session.pause(True)
        assert threads.generation is None
        sampling.session.pause(False)
        assert threads.lacking(target.start_ns, [away.tid]) == [away.tid]
        assert entry(sampling, away.tid) is None


def test_a_full_map_is_reported(sampling: Sampling) -> None:
    with asleep(sampling) as (target, away):
        threads = OffCpuEntries(sampling.session)
        generation = threads.generation
        assert generation is not None
        many = [away._replace(tid=1 << 23 | number, frames=[]) for number in range(4 * threads.room + 5)]
        made, no_room = threads.put(target.pid, target.start_ns, generation, many, {})
        # A few elements are free on other CPUs.
        assert len(made) + no_room == len(many)
        assert no_room > 0
        threads.clear()
        assert len(sampling.session.maps["python_off"].items()[0]) == 0


class Kernel:
    """The part of ``SamplingPrograms`` that is needed to adopt threads; ``made`` counts those that were."""

    def __init__(self, sampling: Sampling) -> None:
        self.threads = OffCpuEntries(sampling.session)
        self.made = 0
        self.room = (1000, self.threads.room)

    def lacking(self, start_ns: int, tids: Iterable[int]) -> tuple[int, list[int]]:
        return self.threads.generation or 0, self.threads.lacking(start_ns, tids)

    def adopt(self, *args: Any) -> tuple[list[OffCpuThread], int]:
        made, no_room = self.threads.put(*args)
        self.made += len(made)
        return made, no_room

    def disown(self, tid: int, switches: int) -> None:
        self.threads.drop(tid, switches)


class Reader:
    def call(self, op: str, *, pid: int, start_ns: int, timeout: float, **args: Any) -> Message:
        return answer_blocked({"pid": pid, "start_ns": start_ns, **args})


@pytest.mark.parametrize("python", [long_unless(False, INTERPRETERS[0]), sys.executable])
def test_reports_of_a_thread_that_keeps_waking_are_true(sampling: Sampling, python: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(python, TURNS, log) as target:
        # The kernel knows no thread of it, so every report comes from outside.
        sampling.processes.add(target.pid, target.start_ns, target.layout, target.runtime.runtime, 0, 0, 1000)
        sampling.session.attach_tracepoint("python_switch")
        kernel, codes = Kernel(sampling), dict[int, str]()

        def checks(_: Sampled, addresses: Sequence[int]) -> dict[int, int]:
            for code, found in read_codes(Snapshot(target.memory), target.layout, addresses, {}).items():
                codes[code] = found.func
            return {address: check_of(target, address) for address in addresses}

        adoption = Adoption(kernel, threading.Lock(), Reader(), checks)
        process, before = Sampled((target.pid, target.start_ns)), Adopted()

        def enough() -> bool:
            for _ in range(20):
                adoption.visit(process, target.runtime, target.tids(), before)
            return len(reported(sampling, target)) >= 150

        sampling._until(enough)
        parts = reported(sampling, target)
        last = int(parts["ktime"][-1] + parts["duration_ns"][-1])
        sampling._until(lambda: naps(log)[-1:] and naps(log)[-1][0] > last)
        slept = naps(log)
    begins = [begin for begin, _, _ in slept]
    assert (np.diff(parts["ktime"].astype("i8")) > 0).all()
    funcs = set()
    for part in parts:
        since, until = int(part["ktime"]), int(part["ktime"] + part["duration_ns"])
        begin, end, odd = slept[bisect.bisect_right(begins, since) - 1]
        func = codes[int(part["frames"]["code"][0])]
        if func in ("odd", "even"):
            assert begin <= since < until <= end
            assert func == ("odd" if odd else "even")
        funcs.add(func)
    assert {"odd", "even"} <= funcs
    assert kernel.made >= len(parts)


def naps(log: Path) -> list[tuple[int, int, int]]:
    """(begin, end, odd) of the naps that are in the log; its last line may be cut."""
    lines = log.read_text().rpartition("\n")[0].splitlines()
    return [(int(a), int(b), int(c)) for a, b, c in (one.split() for one in lines)]


@pytest.fixture
def programs(pin_root: Path) -> Iterator[SamplingPrograms]:
    session = Session.open("test", ["lifecycle"], pin_root, optional=OBJECTS)
    found = SamplingPrograms(session)
    yield found
    found.close()
    session.close(keep=False)


def test_clock_is_opened_once_for_each_cpu(programs: SamplingPrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    failing: list[int] = []
    real = cpu_clock.open_cpu_clock

    def counted(cpu: int, hz: int) -> int:
        if failing:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        opened.append(cpu)
        return real(cpu, hz)

    monkeypatch.setattr(cpu_clock, "open_cpu_clock", counted)
    online = online_cpus()
    monkeypatch.setattr(cpu_clock, "online_cpus", lambda: online[:1])
    programs.set_clock(19, False)
    programs.set_clock(19, True)
    programs.refresh()
    assert opened == online[:1]
    monkeypatch.setattr(cpu_clock, "online_cpus", lambda: online)
    programs.refresh()
    assert opened == list(online)
    programs.set_clock(99, True)
    assert opened == [*online, *online]
    monkeypatch.setattr(cpu_clock, "online_cpus", lambda: online[:1])
    programs.refresh()
    failing.append(1)
    monkeypatch.setattr(cpu_clock, "online_cpus", lambda: online)
    if len(online) > 1:
        programs.refresh()
        assert programs.clock_refused
    failing.clear()
    programs.refresh()
    assert programs.clock_refused == ""
    programs.set_clock(0, False)
    opened.clear()
    programs.refresh()
    assert opened == []
