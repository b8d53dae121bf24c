"""From the tick of a clock to rows with names and lines: the real programs and reader, on processes that burn, end and
hide."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from fakes import Parsers
from python_sampler_support import each_interpreter
from sampler_support import ServedReaders, readers

from probing.daemon.bpf.session import Session
from probing.daemon.clock import SystemClock
from probing.daemon.python_stack.sampling.programs import OBJECTS, RING, SamplingPrograms
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.python_stack.walk.threads import read_start_ns
from probing.daemon.source import Identity, Loss

Until = Callable[..., Any]
Stack = tuple[tuple[str, str, int | None], ...]

BURN = """\
import threading, time
def leaf(n):
    x = 0
    for i in range(n):
        x += i * i
    return x
def branch():
    while True:
        leaf(1000)
def sleeper():
    while True:
        time.sleep(0.005)
threading.Thread(target=sleeper, daemon=True).start()
print("ready", flush=True)
branch()
"""
BURST = """\
import os, sys, time
print("ready", flush=True)
sys.stdin.readline()
names = {}
exec(compile("def fresh(until, clock):\\n    while clock() < until:\\n        pass\\n", "<burst>", "exec"), names)
names["fresh"](time.process_time() + 0.3, time.process_time)
os._exit(0)
"""
CROWD = """\
import sys, threading
GO = threading.Event()
WAIT = threading.Event()
TIDS = {}
STARTED = threading.Semaphore(0)
def burn():
    while True:
        pass
def member(number):
    TIDS[number] = threading.get_native_id()
    STARTED.release()
    if number == 150:
        GO.wait()
        burn()
    WAIT.wait()
for number in range(160):
    threading.Thread(target=member, args=(number,), daemon=True).start()
for _ in range(160):
    STARTED.acquire()
print(TIDS[150], flush=True)
sys.stdin.readline()
GO.set()
WAIT.wait()
"""
LATE = """\
import sys, threading
def burn():
    while True:
        pass
print("ready", flush=True)
sys.stdin.readline()
thread = threading.Thread(target=burn, daemon=True)
thread.start()
print(thread.native_id, flush=True)
thread.join()
"""
# A thread that hangs, with the main one.
HANGS = """\
import threading
def hangs():
    threading.Event().wait()
thread = threading.Thread(target=hangs, daemon=True)
thread.start()
print(thread.native_id, flush=True)
threading.Event().wait()
"""
# Leaves the CPU a thousand times a second, and then for good.
NAPS = """\
import time
def nap():
    time.sleep(0.001)
def rest():
    print(time.monotonic_ns(), flush=True)
    time.sleep(9999)
print("ready", flush=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    nap()
rest()
"""


class Daemon:
    """The sampler with a session and a reader of its own, and the rows that it has made."""

    def __init__(self, session: Session, reader: ServedReaders, hz: int, off_cpu: bool) -> None:
        self.session = session
        self.programs = SamplingPrograms(session)
        self.stacks = PythonStacks(reader, Parsers())
        self.losses: list[Loss] = []
        self.samples: list[dict[str, Any]] = []
        self.reported: dict[int, Stack] = {}
        self.sampler = PythonSampler(self.programs, reader, self.stacks, self, self, "n1", lambda _: (hz, off_cpu))
        self._clock = SystemClock()

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return Identity(pid, start_ns, "job", "run", "trainer", rank=0)

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        raise AssertionError("rows go back to the drain")

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def watch(self, pid: int, until: Until) -> Identity:
        who = Identity(pid, read_start_ns(pid), "job", "run", "trainer", rank=0)
        self.sampler.process_identified(who)
        until(lambda: self.sampler.sampled)
        return who

    def drain(self) -> int:
        """How many bytes are left in the ring."""
        self.programs.flush()
        ring = self.session.rings[RING]
        records, end = ring.drain(until=self.sampler.ready())
        batches = self.sampler.assemble(records, self._clock.pair())
        ring.commit(end)
        if "python.stacks" in batches:
            for row in batches["python.stacks"].drop_columns(["ts"]).to_pylist():
                self.reported[row["stack_id"]] = tuple((f["func"], f["file"], f["lineno"]) for f in row["frames"])
        if "python.samples" in batches:
            self.samples += batches["python.samples"].drop_columns(["ts"]).to_pylist()
        return ring.backlog

    def seen(self, **chosen: Any) -> list[Stack]:
        """The stacks of all samples in which the columns ``chosen`` are so."""
        self.drain()
        return [self.reported[s["stack_id"]] for s in self.samples if all(s[k] == v for k, v in chosen.items())]

    def stop(self) -> None:
        self.sampler.stop()
        self.programs.close()
        self.stacks.close()


@contextmanager
def daemon(pin_root: Path, hz: int = 99, off_cpu: bool = False, keep: bool = False) -> Iterator[Daemon]:
    with ExitStack() as undo:
        session = Session.open("test", ["lifecycle"], pin_root, optional=OBJECTS)
        undo.callback(session.close, keep)
        found = Daemon(session, undo.enter_context(readers()), hz, off_cpu)
        found.sampler.start()
        undo.callback(found.stop)
        yield found


@contextmanager
def running(text: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*command, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def burns(stack: Stack) -> bool:
    """Whether it is a stack of the main thread of BURN, with a line that it can be in."""
    lines = {"leaf": {3, 4, 5, 6, 2}, "branch": {9}, "<module>": {15}}
    return [func for func, _, _ in stack] == ["leaf", "branch", "<module>"] and all(
        file == "<string>" and number in lines[func] for func, file, number in stack
    )


@each_interpreter
def test_a_program_that_burns(python: str, pin_root: Path, until: Until) -> None:
    with daemon(pin_root) as found, running(BURN, python, "-u") as process:
        assert line(process) == "ready"
        found.watch(process.pid, until)
        until(lambda: sum(burns(stack) for stack in found.seen(tid=process.pid, on_cpu=True)) >= 10)
        main = found.seen(tid=process.pid, on_cpu=True)
        assert {frame[0] for stack in main for frame in stack} == {"leaf", "branch", "<module>"}
        assert {5} <= {stack[0][2] for stack in main if stack[0][0] == "leaf"} <= {2, 3, 4, 5, 6}
        assert all(sample["job"] == "job" and sample["rank"] == 0 for sample in found.samples)
        assert [loss for loss in found.losses if loss.stage == "decode"] == []


def test_time_off_the_cpu(pin_root: Path, until: Until) -> None:
    with daemon(pin_root, off_cpu=True) as found, running(BURN, sys.executable, "-u") as process:
        assert line(process) == "ready"
        found.watch(process.pid, until)
        until(lambda: [stack for stack in found.seen(on_cpu=False) if stack and stack[0][0] == "sleeper"])
        slept = [s for s in found.samples if not s["on_cpu"] and found.reported[s["stack_id"]][:1] != ()]
        assert all(s["duration_ns"] > 0 for s in slept)
        asleep = next(stack for stack in found.seen(on_cpu=False) if stack and stack[0][0] == "sleeper")
        assert asleep[0] == ("sleeper", "<string>", 12)


@each_interpreter
def test_one_that_ends_after_a_burst_keeps_its_samples(python: str, pin_root: Path, until: Until) -> None:
    with daemon(pin_root) as found, running(BURST, python, "-u") as process:
        assert line(process) == "ready"
        who = found.watch(process.pid, until)
        tell(process)
        assert process.wait(60) == 0
        found.sampler.process_exited(who)
        until(lambda: found.drain() == 0)
        fresh = [stack for stack in found.seen() if stack and stack[0][1] == "<burst>"]
        assert len(fresh) >= 1
        assert {stack[0][0] for stack in fresh} == {"fresh"}
        assert {stack[0][2] for stack in fresh} <= {1, 2, 3}
        assert sum(s["count"] for s in found.samples if found.reported[s["stack_id"]] in fresh) >= 15
        # A tick while it ends has no state to go by any more.
        assert {loss.stage for loss in found.losses} <= {"resolve"}


def test_one_thread_of_many(pin_root: Path, until: Until) -> None:
    with daemon(pin_root) as found, running(CROWD, sys.executable, "-u") as process:
        tid = int(line(process))
        found.watch(process.pid, until)
        tell(process)
        until(lambda: [stack for stack in found.seen(tid=tid) if stack[:1] and stack[0][0] == "burn"])


def test_one_in_other_namespaces(pin_root: Path, until: Until) -> None:
    unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    with daemon(pin_root) as found, running(BURN, *unshare, sys.executable, "-u") as process:
        assert line(process) == "ready"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found.watch(int(child), until)
        until(lambda: any(burns(stack) for stack in found.seen(tid=int(child))))


def test_a_thread_that_starts_later_is_found(pin_root: Path, until: Until) -> None:
    with daemon(pin_root) as found, running(LATE, sys.executable, "-u") as process:
        assert line(process) == "ready"
        found.watch(process.pid, until)
        tell(process)
        tid = int(line(process))
        until(lambda: [stack for stack in found.seen(tid=tid) if stack[:1] and stack[0][0] == "burn"])
        assert {loss.stage for loss in found.losses} <= {"resolve"}


def test_a_collector_that_is_killed_loses_nothing(pin_root: Path, until: Until) -> None:
    with running(BURN, sys.executable, "-u") as process:
        assert line(process) == "ready"
        with daemon(pin_root, keep=True) as first:
            first.watch(process.pid, until)
            until(lambda: first.session.rings[RING].backlog > 10 * 2048)
        with daemon(pin_root) as second:
            waiting = second.session.rings[RING].drain().records
            assert len(waiting) >= 10
            until(lambda: second.drain() == 0)
            main = second.seen(tid=process.pid)
            assert all(burns(stack) or stack[0][0] == "branch" for stack in main)
            assert sum(s["count"] for s in second.samples) >= len(waiting)
            assert [loss for loss in second.losses if loss.stage == "decode"] == []


def off_cpu_ns(found: Daemon, func: str, **chosen: Any) -> int:
    """Returns how long ``func`` was off the CPU, as reported so far, ns."""
    found.drain()
    rows = [s for s in found.samples if not s["on_cpu"] and all(s[k] == v for k, v in chosen.items())]
    return sum(s["duration_ns"] for s in rows if func in {name for name, _, _ in found.reported[s["stack_id"]]})


def test_threads_that_hung_before_are_reported(pin_root: Path, until: Until) -> None:
    with running(HANGS, sys.executable, "-u") as process:
        tid = int(line(process))
        began, counted = time.monotonic_ns(), 0
        # A collector that is started again knows nothing of the one before it, but finds its maps: the thread's time
        # between the two is counted as well.
        for keep in (True, False):
            with daemon(pin_root, off_cpu=True, keep=keep) as found:
                found.watch(process.pid, until)
                until(lambda: off_cpu_ns(found, "hangs", tid=tid) > 2_000_000_000)
                until(lambda: off_cpu_ns(found, "<module>", tid=process.pid) > 2_000_000_000)
                counted += off_cpu_ns(found, "hangs", tid=tid)
                assert counted <= time.monotonic_ns() - began
                assert {stack[-1][0].rpartition(".")[2] for stack in found.seen(tid=tid)} == {"_bootstrap"}
                assert {s["gil"] for s in found.samples if s["tid"] == tid} == {None}
                assert [loss for loss in found.losses if loss.stage == "decode"] == []


def test_a_long_sleep_after_many_short_ones_is_as_long_as_it_is(pin_root: Path, until: Until) -> None:
    with daemon(pin_root, off_cpu=True) as found, running(NAPS, sys.executable, "-u") as process:
        assert line(process) == "ready"
        found.watch(process.pid, until)
        began = int(line(process))

        def reported() -> int:
            # Instead of the next scan's time.
            found.sampler.settings_changed()
            return off_cpu_ns(found, "rest")

        until(lambda: reported() > 2_000_000_000)
        # With the weight of the short ones it would be twenty times as long; a short wait at its begin may have that.
        assert reported() <= 2 * (time.monotonic_ns() - began)
        assert off_cpu_ns(found, "nap") > 0
