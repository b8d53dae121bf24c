"""Shares of the sampler on the live kernel: a process of very many threads leaves others their rows, and is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from python_sampler_support import INTERPRETERS, Sampling, Target, started

from probing.daemon.bpf.session import Session

# Slots of python_walk.bpf.h, AWAY_SHARE of python_off.bpf.c
SAMPLES, AWAY, AWAY_SHARE = 254, 255, 512
RECORDS = 30
# Threads that leave the CPU after a line was read, and stay away.
WAITERS = """
import sys, threading, time

event = threading.Event()

def waits():
    event.wait()
    time.sleep(1000)

for _ in range({threads}):
    threading.Thread(target=waits, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
event.set()
time.sleep(1000)
"""
Open = Callable[..., Sampling]


@pytest.fixture
def open_sampling(pin_root: Path, until: Callable[..., object]) -> Iterator[Open]:
    with ExitStack() as undo:

        def make(**sizes: int) -> Sampling:
            session = Session.open("test", ["python"], pin_root, optional=["python_off"], sizes=sizes)
            undo.callback(session.close, keep=False)
            assert session.refused == {}
            made = Sampling(session, until)
            undo.callback(made.close)
            session.attach_tracepoint("python_switch")
            return made

        yield make


def go(target: Target) -> None:
    stdin = target.process.stdin
    assert stdin is not None
    stdin.write("\n")
    stdin.flush()


def away(sampling: Sampling, at_least_ns: int = 1_000_000_000) -> Counter[int]:
    """How many threads of each process are in the map, and have been for so long."""
    _, entries = sampling.session.maps["python_off"].items()
    return Counter(entries["sample"]["tgid"][entries["since"] + at_least_ns <= time.monotonic_ns()].tolist())


def test_a_process_takes_no_more_of_the_ring_than_leaves_others_theirs(
    open_sampling: Open, until: Callable[..., object]
) -> None:
    sampling = open_sampling(python_samples=1 << 16)
    with (
        started(INTERPRETERS[-1], WAITERS.format(threads=61)) as flooder,
        started(INTERPRETERS[-1], WAITERS.format(threads=2)) as victim,
    ):
        for target in (flooder, victim):
            sampling.add(target, off_rate=100_000)
            go(target)
        # With the main threads.
        until(lambda: away(sampling) == {flooder.pid: 62, victim.pid: 3})
        sampling.samples(victim)
        before = sampling.session.refusals()
        lost = sampling.session.counters()["python_samples"]["lost"]
        sampling.session.run_program("python_off_flush", b"")
        ring = sampling.session.rings["python_samples"]
        drained = ring.drain()
        ring.commit(drained.position)
        samples = Counter(drained.records["tgid"].tolist())
        refused = sampling.session.refusals()
        # On a busy machine the ring was full at times until it was drained.
        left_out = {pid: refused.get((SAMPLES, pid), 0) - before.get((SAMPLES, pid), 0) for pid in samples}
        assert samples[victim.pid] == 3
        assert left_out[victim.pid] == 0
        assert samples[flooder.pid] + left_out[flooder.pid] == 62
        assert RECORDS // 2 - 3 <= samples[flooder.pid] <= RECORDS // 2 + 1
        assert sampling.session.counters()["python_samples"]["lost"] == lost


def test_a_process_takes_no_more_than_its_part_of_the_threads_that_are_away(
    open_sampling: Open, until: Callable[..., object]
) -> None:
    sampling = open_sampling()
    with (
        started(INTERPRETERS[-1], WAITERS.format(threads=617)) as flooder,
        started(INTERPRETERS[-1], WAITERS.format(threads=2)) as victim,
    ):
        sampling.add(flooder, off_rate=100_000)
        go(flooder)
        until(lambda: sum(away(sampling).values()) > AWAY_SHARE // 2)
        until(lambda: sampling.session.refusals().get((AWAY, flooder.pid), 0) >= 1)
        sampling.add(victim, off_rate=100_000)
        go(victim)
        until(lambda: away(sampling)[victim.pid] == 3)
        assert 0 < away(sampling)[flooder.pid] <= AWAY_SHARE
        # What the flush counts is what there is.
        sampling.session.run_program("python_off_flush", b"")
        shares = sampling.session.maps["python_shares"]
        assert shares.lookup(flooder.pid)["away"] == away(sampling, 0)[flooder.pid]
        assert shares.lookup(victim.pid)["away"] == 3
        assert sampling.session.counters()["python_samples"]["lost"] == 0
        assert (AWAY, victim.pid) not in sampling.session.refusals()
