"""Samples of running threads, of every interpreter that is found, beside what a walk from user space says of them."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from python_sampler_support import (
    INTERPRETERS,
    ON_CPU,
    UNRESOLVED,
    Sampling,
    check_of,
    cpu_seconds,
    each_interpreter,
    started,
)

from probing.api.errors import AttachError, UsageError
from probing.daemon.bpf.cpu_clock import CpuClock
from probing.daemon.bpf.perf_events import online_cpus
from probing.daemon.bpf.session import Session
from probing.daemon.python_stack.walk.layouts import TABLE, Layout

BURN = """
def burns(ready):
    if ready:
        print("ready", flush=True)
    n = 0
    while True:
        n += 1

def calls(ready):
    burns(ready)

def outer(ready=True):
    calls(ready)
"""
MAIN = BURN + "outer()\n"
MANY = (
    BURN
    + """
import threading, time
stop = threading.Event()

def waits():
    stop.wait()

for number in range(1, 160):
    threading.Thread(target=outer if number == 149 else waits, args=(False,) * (number == 149), daemon=True).start()
print("ready", flush=True)
stop.wait()
"""
)
DEEP = """
def down(n):
    if n:
        down(n - 1)
    print("ready", flush=True)
    while True:
        pass

import sys
sys.setrecursionlimit(10000)
down({depth})
"""


@pytest.fixture
def sampling(pin_root: Path, until: Callable[..., object]) -> Iterator[Sampling]:
    session = Session.open("test", ["python"], pin_root)
    made = Sampling(session, until)
    yield made
    made.close()
    session.close(keep=False)


@each_interpreter
def test_samples_are_what_a_walk_sees(sampling: Sampling, python: str) -> None:
    with started(python, MAIN) as target:
        sampling.add(target)
        sampling.tick()
        samples = sampling.wait(target, 50)
        thread, codes = target.threads[target.pid]
        walked = [frame.code for frame in thread.frames]
        lines = [codes[frame.code].line(target.layout, frame) for frame in thread.frames]
        assert [codes[code].func for code in walked] == ["burns", "calls", "outer", "<module>"]
        checks = [check_of(target, code) for code in walked]
        for sample in samples:
            frames = sample["frames"][: sample["depth"]]
            assert frames["code"].tolist() == walked
            assert frames["check"].tolist() == checks
            decoded = target.frames(sample, codes)
            assert [line for _, line in decoded[1:]] == lines[1:]
            assert decoded[0][1] in (6, 7)
        assert set(samples["kind"].tolist()) == {ON_CPU}
        assert set(samples["tid"].tolist()) == {target.pid}
        assert set(samples["start_ns"].tolist()) == {target.start_ns}
        assert samples["user_ip"].all()
        assert not samples["duration_ns"].any()
        # Equal frames, equal hash; other frames, another one.
        by_frames = {(s["frames"][: s["depth"]].tobytes(), int(s["hash"])) for s in samples}
        assert len({hash_ for _, hash_ in by_frames}) == len({frames for frames, _ in by_frames}) == len(by_frames)


@each_interpreter
def test_holder_of_the_gil_is_recorded(sampling: Sampling, python: str) -> None:
    with started(python, MAIN) as target:
        gil = 0
        if target.layout.interp_gil is not None:
            interpreter = target.word(target.runtime.runtime + target.layout.interpreters_head)
            gil = target.word(interpreter + target.layout.interp_gil)
        sampling.add(target, gil=gil)
        sampling.tick()
        flags = sampling.wait(target, 50)["flags"]
        assert not (flags & 8).any()
        # Between releasing and taking it again, the one thread that there is does next to nothing.
        assert (flags & 4).astype(bool).mean() > 0.5


@each_interpreter
def test_thread_150_of_160_is_sampled(sampling: Sampling, python: str) -> None:
    with started(python, MANY) as target:
        assert len(target.threads) == 160
        sampling.add(target)
        sampling.tick()
        samples = sampling.wait(target, 20, tid=target.named("burns"))
        codes = target.threads[target.named("burns")][1]
        names = {tuple(func for func, _ in target.frames(s, codes))[:3] for s in samples}
        assert names == {("burns", "calls", "outer")}
        every = sampling.samples(target)
        assert not (every["kind"] == UNRESOLVED).any()


@pytest.mark.parametrize("depth", [50, 3000])
def test_deep_stacks_are_cut_and_say_so(sampling: Sampling, depth: int) -> None:
    for python in INTERPRETERS:
        with started(python, DEEP.format(depth=depth)) as target:
            sampling.add(target)
            sampling.tick()
            sample = sampling.wait(target, 3)[0]
            cut = depth == 3000
            assert bool(sample["flags"] & 1) == cut
            assert not sample["flags"] & 2
            walked = [frame.code for frame in target.threads[target.pid][0].frames][:128]
            assert abs(int(sample["depth"]) - min(depth + 2, 128)) <= (2 if cut else 0)
            assert sample["frames"]["code"][: sample["depth"]].tolist() == walked[: sample["depth"]]
            sampling.processes.clear()


def test_thread_that_is_not_known_is_unresolved_until_it_is_registered(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        sampling.processes.set_threads(target.pid, target.start_ns, {})
        sampling.tick()
        samples = sampling.wait(target, 5, UNRESOLVED)
        assert set(samples["depth"].tolist()) == {0}
        assert set(samples["tid"].tolist()) == {target.pid}
        assert len(set(samples["hash"].tolist())) == 1
        # What stands at another address, or another thread's id, proves nothing.
        address, thread_id = target.tids()[target.pid]
        for wrong in ((address + 8, thread_id), (address, thread_id + 64), (8, thread_id)):
            sampling.processes.set_threads(target.pid, target.start_ns, {target.pid: wrong})
            sampling.wait(target, len(sampling.samples(target)) + 5, UNRESOLVED)
        assert not (sampling.samples(target)["kind"] == ON_CPU).any()
        sampling.processes.set_threads(target.pid, target.start_ns, target.tids())
        sampling.wait(target, 5, ON_CPU)


def nothing_comes(sampling: Sampling, target: Any) -> None:
    sampling.burn(target, 0.05)
    before = len(sampling.samples(target))
    sampling.burn(target)
    assert len(sampling.samples(target)) == before


def test_a_thread_without_python_has_no_sample(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        sampling.processes.set_threads(target.pid, target.start_ns, {target.pid: (0, 0)})
        sampling.tick()
        nothing_comes(sampling, target)
        assert len(sampling.samples(target)) == 0


def test_only_the_process_that_was_meant_is_sampled(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target, start_ns=target.start_ns - 10_000_000)
        sampling.tick()
        nothing_comes(sampling, target)
        sampling.add(target)
        sampling.wait(target, 5)
        sampling.processes.remove(target.pid, target.start_ns - 10_000_000)
        sampling.wait(target, len(sampling.samples(target)) + 5)
        sampling.processes.remove(target.pid, target.start_ns)
        nothing_comes(sampling, target)


def test_pause_and_a_silent_daemon_stop_the_sampling(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        sampling.tick()
        sampling.wait(target, 5)
        sampling.session.pause(True)
        nothing_comes(sampling, target)
        sampling.session.pause(False)
        sampling.wait(target, len(sampling.samples(target)) + 5)
        sampling.session.maps["control"].update(0, (1, 0, 0, 0))
        nothing_comes(sampling, target)


def test_a_lower_rate_is_that_part_of_the_ticks(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target, rate=70)
        sampling.tick(999)
        before = cpu_seconds(target.pid), len(sampling.samples(target))
        sampling.burn(target, 3)
        used, found = cpu_seconds(target.pid) - before[0], len(sampling.samples(target)) - before[1]
        # 210 of 3,000 are expected, with a deviation of 14.
        assert 0.03 < found / (used * 999) < 0.12
        sampling.processes.set_rate(target.pid, target.start_ns, 0, 0)
        nothing_comes(sampling, target)


def test_only_a_stack_that_was_not_seen_wakes_the_reader(sampling: Sampling, until: Callable[..., object]) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        ring = sampling.session.rings["python_samples"]
        poll = select.epoll()
        poll.register(ring.fileno(), select.EPOLLIN | select.EPOLLET)
        sampling.add(target)
        sampling.tick()
        assert poll.poll(20)
        seen = sampling.session.maps["python_seen"]
        until(lambda: len(sampling.samples(target)) > 200)
        assert len(seen.items()[0]) == len(set(sampling.samples(target)["hash"].tolist()))
        poll.close()
        # The stacks of the loop are few: far fewer than the samples of it.
        assert len(seen.items()[0]) < 20


def test_clock_runs_on_every_cpu_and_stops(sampling: Sampling) -> None:
    assert sampling.clock.cpus == []
    sampling.clock.set(19)
    assert sampling.clock.cpus == online_cpus()
    before = len(list(Path("/proc/self/fd").iterdir()))
    sampling.clock.set(99)
    sampling.clock.refresh()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    sampling.clock.set(0)
    assert sampling.clock.cpus == []
    for hz in (-1, 1000):
        with pytest.raises(UsageError):
            sampling.clock.set(hz)
    with pytest.raises(AttachError):
        CpuClock(sampling.session.maps["control"].fd).set(19)


def test_clock_without_links_runs_the_program_too(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(*_: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("probing.daemon.bpf.syscalls.link_perf_event", too_old)
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        sampling.tick()
        sampling.wait(target, 5)


def test_clear_removes_what_another_daemon_registered(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        again = Sampling(sampling.session, sampling._until)
        again.processes.clear()
        for name in ("python_processes", "python_threads", "python_seen"):
            assert len(sampling.session.maps[name].items()[0]) == 0
        assert again.processes.set_threads(target.pid, target.start_ns, target.tids()) == 0
        assert len(sampling.session.maps["python_threads"].items()[0]) == 0


def test_more_than_there_is_room_for_is_said(pin_root: Path) -> None:
    sizes = {"python_processes": 1, "python_threads": 4 * 3}
    session = Session.open("test", ["python"], pin_root, sizes=sizes)
    sampling = Sampling(session, lambda *_: None)
    with started(INTERPRETERS[-1], MAIN) as target:
        sampling.add(target)
        threads = dict.fromkeys(range(1, 6), (0, 0))
        assert sampling.processes.set_threads(target.pid, target.start_ns, threads) == 2
        assert sampling.processes.set_threads(target.pid, target.start_ns, {1: (8, 8)}) == 0
        with pytest.raises(AttachError) as caught:
            sampling.processes.add(1, 1, target.layout, 0, 0, 1, 0)
        assert caught.value.hint
        sampling.processes.remove(target.pid, target.start_ns)
        sampling.processes.add(1, 1, target.layout, 0, 0, 1, 0)
    session.close(keep=False)


# A PyThreadState at 0, a frame at 512, a code object at 1024.
MADE_UP = """
import ctypes, struct, threading
memory = ctypes.create_string_buffer(4096)
base, me = ctypes.addressof(memory), threading.get_ident()
for at, value in {{{words}}}.items():
    struct.pack_into("<Q", memory, at, value)
print("ready", base, me, sep="\\n", flush=True)
while True:
    pass
"""
# As 3.8 has them.
WORDS_38 = "24: {frame}, 176: me, 536: {previous}, 544: {code}, 616: 6, "
WORDS_38 += "1064: 7, 1128: 0x1111, 1136: {name}, 1144: 0x3333, 2072: 0x4444"
# As 3.11 has them; a frame's owner is at 69.
WORDS_311 = "56: base + 256, 152: me, 264: base + 512, 544: base + 1024, 568: base + 1214, 576: {owner} << 40, "
WORDS_311 += "1096: 7, 1136: 0x1111, 1144: base + 2048, 1152: 0x2222, 1160: 0x3333, 2072: 0x4444"
# As 3.12 has them, with the shim of a run of the interpreter loop at 640.
WORDS_312 = "56: base + 256, 136: me, 256: base + 512, 512: base + 1024, 520: {previous}, 568: base + 1222, "
WORDS_312 += "704: 3 << 48, 1092: 7, 1136: 0x1111, 1144: base + 2048, 1152: 0x2222, 1160: 0x3333, 2072: 0x4444"
CUT, FAULT = 1, 2
# Not mapped, the kernel's, and no address at all.
WILD = (0x1000, 0xFFFF_FFFF_8000_0000, 0x8000_0000_0000_0000, (1 << 64) - 1)


@pytest.mark.parametrize(
    ("frame", "previous", "code", "name", "depth", "flags"),
    [
        ("base + 512", "0", "base + 1024", "base + 2048", 1, 0),
        ("0", "0", "0", "0", 0, 0),
        # Round and round.
        ("base + 512", "base + 512", "base + 1024", "base + 2048", 128, CUT),
        *((f"{bad}", "0", "base + 1024", "base + 2048", 0, FAULT) for bad in WILD),
        *(("base + 512", f"{bad}", "base + 1024", "base + 2048", 1, FAULT) for bad in WILD),
        *(("base + 512", "0", f"{bad}", "base + 2048", 0, FAULT) for bad in (0, *WILD)),
        *(("base + 512", "0", "base + 1024", f"{bad}", 0, FAULT) for bad in (0, *WILD)),
    ],
)
def test_hostile_memory_ends_a_walk_and_no_more(
    sampling: Sampling, frame: str, previous: str, code: str, name: str, depth: int, flags: int
) -> None:
    words = WORDS_38.format(frame=frame, previous=previous, code=code, name=name)
    assert sample_of(sampling, TABLE[3, 8], words) == (depth, flags)


@pytest.mark.parametrize(
    ("minor", "words", "flags"),
    [
        (11, WORDS_311.format(owner=0), 0),
        # A generator is outermost.
        (11, WORDS_311.format(owner=1), FAULT),
        (12, WORDS_312.format(previous="base + 640"), 0),
        (12, WORDS_312.format(previous="0"), FAULT),
    ],
)
def test_a_call_that_is_not_linked_to_its_caller_is_marked(
    sampling: Sampling, minor: int, words: str, flags: int
) -> None:
    assert sample_of(sampling, TABLE[3, minor], words) == (1, flags)


def sample_of(sampling: Sampling, layout: Layout, words: str) -> tuple[int, int]:
    """Returns depth and flags of a sample of made-up memory, whose frames all have the code at 1024."""
    with started(INTERPRETERS[-1], MADE_UP.format(words=words)) as target:
        assert target.process.stdout
        base, thread_id = (int(target.process.stdout.readline()) for _ in range(2))
        target.layout = layout
        sampling.processes.add(target.pid, target.start_ns, layout, 0, 0, 999, 0)
        sampling.processes.set_threads(target.pid, target.start_ns, {target.pid: (base, thread_id)})
        sampling.tick()
        sample = sampling.wait(target, 3)[-1]
        depth = int(sample["depth"])
        wanted = {(base + 1024, 6, check_of(target, base + 1024))} if depth else set()
        assert set(sample["frames"][:depth].tolist()) == wanted
        return depth, int(sample["flags"]) & 3
