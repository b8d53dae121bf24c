"""Off-CPU time of Python threads: its sum is what it was, nothing is counted twice, and no thread is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from python_sampler_support import INTERPRETERS, OFF_CPU, Sampling, Target, check_of, each_interpreter, started

from probing.api.errors import AttachError, NotFound, PrivilegeError
from probing.daemon.bpf import pins
from probing.daemon.bpf.build import compile_object
from probing.daemon.bpf.session import Session

NAPS = """
import threading, time

def naps(seconds):
    while True:
        time.sleep(seconds)

def outer(seconds):
    naps(seconds)

for _ in range({threads}):
    threading.Thread(target=outer, args=({seconds},), daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
# Reads a line, then sleeps until it gets another one.
LONG = """
import sys

def sleeps():
    return sys.stdin.readline()

print("ready", flush=True)
while sleeps():
    print("awake", flush=True)
"""


@pytest.fixture
def sampling(pin_root: Path, until: Callable[..., object]) -> Iterator[Sampling]:
    session = Session.open("test", ["python"], pin_root, optional=["python_off"])
    assert session.refused == {}
    made = Sampling(session, until)
    yield made
    made.close()
    session.close(keep=False)


def off_cpu(sampling: Sampling, target: Target, tid: int) -> np.ndarray[Any, Any]:
    found = sampling.samples(target)
    return found[(found["kind"] == OFF_CPU) & (found["tid"] == tid)]


def off_cpu_ns(pid: int, tid: int) -> int:
    """Time off the CPU so far, ns, from an arbitrary start: what the kernel did not count as run by the thread."""
    ran = int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0])
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) - ran


def flush(sampling: Sampling) -> int:
    return sampling.session.run_program("python_off_flush", b"")


def open_entries(sampling: Sampling, target: Target) -> list[int]:
    _, entries = sampling.session.maps["python_off"].items()
    return [int(tid) for tid in entries["sample"]["tid"][entries["sample"]["tgid"] == target.pid]]


@each_interpreter
def test_time_of_a_sleeper_is_all_there(sampling: Sampling, python: str) -> None:
    with started(python, NAPS.format(threads=1, seconds=0.02)) as target:
        tid = target.named("naps")
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        samples = sampling.wait(target, 30, OFF_CPU, tid)
        thread, codes = target.threads[tid]
        walked = [frame.code for frame in thread.frames]
        for sample in samples:
            frames = sample["frames"][: sample["depth"]]
            assert frames["code"].tolist() == walked
            assert frames["check"].tolist() == [check_of(target, code) for code in walked]
            # A switch in the few instructions between two naps is as good as one in a nap.
            assert target.frames(sample, codes)[0] in (("naps", 5), ("naps", 6))
        assert samples["user_ip"].all()
        # Each was walked, so each stands for itself: from the first to the last it was off all the time but some us.
        assert (np.diff(samples["ktime"].astype("i8")) > 0).all()
        span = int(samples["ktime"][-1] + samples["duration_ns"][-1] - samples["ktime"][0])
        assert 0.5 * span < int(samples["duration_ns"].sum()) <= span


def test_part_of_the_switches_stands_for_all(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], NAPS.format(threads=1, seconds=0.001)) as target:
        tid = target.named("naps")
        sampling.add(target, rate=0, off_rate=20)
        sampling.session.attach_tracepoint("python_switch")
        before = off_cpu_ns(target.pid, tid)
        samples = sampling.wait(target, 150, OFF_CPU, tid)
        off_ns = off_cpu_ns(target.pid, tid) - before
        span = int(samples["ktime"][-1] - samples["ktime"][0])
        # Of some 900 switches a second: 150 walks estimate the sum to 10 %, and much less than all were walked.
        assert 0.5 * off_ns < int(samples["duration_ns"].sum()) < 1.7 * off_ns
        assert len(samples) < span / 1e9 * 100 + 120
        assert (samples["duration_ns"] > 5_000_000).any()


def test_long_sleeper_is_reported_before_it_wakes(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], LONG) as target:
        stdin, stdout = target.process.stdin, target.process.stdout
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        stdin.write("on\n")
        stdin.flush()
        assert stdout.readline() == "awake\n"
        for reported in (1, 2):
            sampling._until(lambda: flush(sampling) == 1)
            samples = off_cpu(sampling, target, target.pid)
            assert (samples["duration_ns"] >= 1_000_000_000).sum() == reported
        stdin.write("on\n")
        stdin.flush()
        assert stdout.readline() == "awake\n"
        sampling._until(lambda: open_entries(sampling, target) == [target.pid])
        samples = off_cpu(sampling, target, target.pid)
        ended = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        parts = samples[samples["depth"] == samples["depth"].max()]
        ends = parts["ktime"] + parts["duration_ns"]
        # Told in parts that follow each other without a gap, and no nanosecond twice.
        assert (ends[:-1] <= parts["ktime"][1:]).all()
        long_ones = np.flatnonzero(parts["duration_ns"] >= 1_000_000_000)
        assert (ends[long_ones] == parts["ktime"][long_ones + 1]).all()
        assert 2_000_000_000 <= int(samples["duration_ns"].sum()) <= ended - began


def test_nothing_is_counted_twice_by_flushes_while_threads_wake(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], NAPS.format(threads=8, seconds=1.0003)) as target:
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        flushed = 0
        until = time.monotonic() + 4
        while time.monotonic() < until:
            flushed += flush(sampling)
        assert flushed
        for tid in target.threads:
            samples = off_cpu(sampling, target, tid)
            ends = samples["ktime"] + samples["duration_ns"]
            assert (ends[:-1] <= samples["ktime"][1:]).all()
        # The main thread may have begun its wait before it was sampled.
        assert all(len(off_cpu(sampling, target, tid)) for tid in target.threads if tid != target.pid)
        assert len(target.threads) == 9


def test_threads_that_end_leave_nothing_behind(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], NAPS.format(threads=5, seconds=0.01)) as target:
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        for tid in target.threads:
            if tid != target.pid:
                sampling.wait(target, 3, OFF_CPU, tid)
        sampling._until(lambda: open_entries(sampling, target))
        os.kill(target.pid, signal.SIGKILL)
        target.process.wait(20)
        sampling._until(lambda: open_entries(sampling, target) == [])


def test_what_is_no_longer_sampled_is_dropped(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], LONG) as target:
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        target.process.stdin.write("on\n")
        target.process.stdin.flush()
        sampling._until(lambda: open_entries(sampling, target) == [target.pid])
        sampling._until(lambda: flush(sampling) == 1)
        sampling.processes.set_rate(target.pid, target.start_ns, 0, 0)
        count = len(sampling.samples(target))
        sampling._until(lambda: flush(sampling) == 0 and open_entries(sampling, target) == [])
        assert len(sampling.samples(target)) == count


def test_pause_makes_what_was_begun_void(sampling: Sampling) -> None:
    with started(INTERPRETERS[-1], LONG) as target:
        sampling.add(target, rate=0, off_rate=1000)
        sampling.session.attach_tracepoint("python_switch")
        target.process.stdin.write("on\n")
        target.process.stdin.flush()
        assert target.process.stdout.readline() == "awake\n"
        sampling._until(lambda: open_entries(sampling, target) == [target.pid])
        sampling._until(lambda: flush(sampling) == 1)
        sampling.session.pause(True)
        assert flush(sampling) == 0
        sampling.session.pause(False)
        count = len(sampling.samples(target))
        sampling._until(lambda: flush(sampling) == 0 and open_entries(sampling, target) == [])
        assert len(sampling.samples(target)) == count


def test_off_cpu_begins_and_ends_on_demand(sampling: Sampling) -> None:
    session = sampling.session
    with started(INTERPRETERS[-1], NAPS.format(threads=1, seconds=0.01)) as target:
        tid = target.named("naps")
        sampling.add(target, rate=999, off_rate=1000)
        assert "python_switch" not in session.links
        link = session.attach_tracepoint("python_switch")
        assert session.attach_tracepoint("python_switch") is link
        sampling.wait(target, 5, OFF_CPU, tid)
        session.detach(link)
        count = len(off_cpu(sampling, target, tid))
        sampling.tick()
        sampling.wait(target, 1)
        assert len(off_cpu(sampling, target, tid)) == count
        session.attach_tracepoint("python_switch")
        sampling.wait(target, count + 5, OFF_CPU, tid)


def test_link_on_demand_ends_with_its_daemon(pin_root: Path) -> None:
    session = Session.open("test", ["python"], pin_root, optional=["python_off"])
    session.attach_tracepoint("python_switch")
    session.close(keep=True)
    session = Session.open("test", ["python"], pin_root, optional=["python_off"])
    assert session.adopted
    assert "python_switch" not in session.links
    with pytest.raises(NotFound):
        session.attach_tracepoint("no_such_program")
    for program in ("python_on_cpu", "python_off_flush"):
        with pytest.raises(AttachError):
            session.attach_tracepoint(program)
    session.close(keep=False)


RIGHTS = """
import sys
from pathlib import Path
from probing.daemon.bpf.cpu_clock import CpuClock
from probing.daemon.bpf.session import Session

session = Session.open("test", ["python"], Path(sys.argv[1]), optional=["python_off"])
session.attach_tracepoint("python_switch")
clock = CpuClock(session.programs["python_on_cpu"])
clock.set(19)
print(len(clock.cpus) > 0, session.refused, session.run_program("python_off_flush", b""))
"""


def test_rights_of_the_collector_are_enough(pin_root: Path) -> None:
    pins.prepare("test", pin_root, owner=(65534, 65534))
    rights = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    rights += [f"--{kind}=-all,+bpf,+perfmon" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    command = [*rights, sys.executable, "-c", RIGHTS, str(pin_root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True {} 0\n", "")


REFUSED = """
#include "guard.bpf.h"
SEC("raw_tp")
int refused(struct bpf_raw_tracepoint_args *ctx)
{
	return *(volatile int *)ctx->args[0];
}
char LICENSE[] SEC("license") = "GPL";
"""


def test_session_opens_without_an_optional_object_that_is_refused(pin_root: Path, tmp_path: Path) -> None:
    source = tmp_path / "refused.bpf.c"
    source.write_text(REFUSED)
    path = compile_object(source)
    with pytest.raises((AttachError, PrivilegeError)):
        Session.open("test", ["python", path], pin_root)
    for adopted in (False, True):
        session = Session.open("test", ["python"], pin_root, optional=[path])
        assert list(session.refused) == ["refused"]
        assert isinstance(session.refused["refused"], AttachError | PrivilegeError)
        assert "python_on_cpu" in session.programs
        assert "refused" not in session.programs
        assert session.adopted == adopted
        session.close(keep=True)
