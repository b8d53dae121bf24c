"""Cost of the probes on NCCL and libcudart to the calling thread: ``python bench/nccl_hits.py [--blocks 30]``.

Two copies of the doubles of libnccl and libcudart (tests/doubles), one with probes and one without, are called in turn
by loops in C: the difference is the cost of a hit, including the kernel's way to the BPF program. The kernel's own
count of the time in each BPF program is printed as well. Then a job makes 2,000 collectives a second, each after a loop
of arithmetic, with its events and a watchdog. It is measured with and without probes in turn, and with the probes on
and paused in turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from statistics_of_blocks import Ratio, ratio_of_blocks, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles.doubles import DoubleJob, build
from doubles.watching import OBJECTS, Watching

from probing.daemon.bpf import pins
from probing.daemon.bpf.session import Session

STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
# By the calls that a turn makes: (name of the loop, hits of probes in a turn).
LOOPS = {
    "ncclAllReduce": ("all_reduce", 1),
    "ncclGroupStart, ncclGroupEnd": ("group", 2),
    "cudaEventRecord, nothing open": ("record", 1),
    "cudaEventQuery, entry and return": ("query", 2),
    "ncclAllReduce, cudaEventRecord, cudaEventQuery": ("work", 4),
}
# Fewer turns than the ring holds records, because a hit whose record is lost would cost less.
TURNS = 30_000
STEP_NS = 500_000
RATE = 1_000_000_000 // STEP_NS


class Draining:
    """Drains in a thread, as the collector does, except while it is paused."""

    def __init__(self, watching: Watching) -> None:
        self._watching, self._ended = watching, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self._watching.drain(keep=False)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


_numbers = itertools.count()


@contextmanager
def session_of(objects: Sequence[str | Path] = OBJECTS) -> Iterator[Session]:
    root = Path(f"/sys/fs/bpf/probingd-bench-{os.getpid()}-{next(_numbers)}")
    try:
        session = Session.open("bench", list(objects), root)
        try:
            yield session
        finally:
            session.close(keep=False)
    finally:
        pins.cleanup(pin_root=root)
        root.rmdir()


def programs(session: Session) -> dict[str, tuple[int, int]]:
    """Returns (runs, ns in all runs) of each BPF program of the session, by name, as the kernel counts them."""
    found: dict[str, tuple[int, int]] = {}
    for name, fd in session.programs.items():
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        told = dict(line.split(":", 1) for line in lines)
        found[name] = (int(told["run_cnt"]), int(told["run_time_ns"]))
    return found


def hits(plain: DoubleJob, probed: DoubleJob, watching: Watching, blocks: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (loop, hits_a_turn) in LOOPS.items():
        with_ns, without_ns = [], []
        for _ in range(blocks):
            without_ns.append(plain.do(f"loop {loop} {TURNS}")[0] / TURNS)
            with_ns.append(probed.do(f"loop {loop} {TURNS}")[0] / TURNS)
            watching.drain(keep=False)
        cost = np.asarray(with_ns) - np.asarray(without_ns)
        chosen = np.random.default_rng(7).choice(cost, (10_000, blocks))
        low, high = np.percentile(np.median(chosen, axis=1), [2.5, 97.5])
        rows.append(
            {
                "loop": name,
                "without, ns": f"{statistics.median(without_ns):.0f}",
                "with, ns": f"{statistics.median(with_ns):.0f}",
                "ratio": f"{ratio_of_blocks(with_ns, without_ns).ratio:.1f}",
                "cost, ns": f"{np.median(cost):.0f} [{low:.0f}, {high:.0f}]",
                "a hit, ns": f"{np.median(cost) / hits_a_turn:.0f}",
            }
        )
    return rows


def in_programs(probed: DoubleJob, watching: Watching, blocks: int) -> list[dict[str, object]]:
    """Runs the same loops while the kernel counts, which itself costs time; returns the times in the BPF programs."""
    rows: list[dict[str, object]] = []
    before_value = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        for name, (loop, _) in LOOPS.items():
            before = programs(watching.session)
            for _ in range(blocks):
                probed.do(f"loop {loop} {TURNS}")
                watching.drain(keep=False)
            for program, totals in sorted(programs(watching.session).items()):
                runs, ns = (new - old for new, old in zip(totals, before[program], strict=True))
                # A program that runs only once in a loop, such as at the end of an event, gives no useful mean.
                if runs >= TURNS:
                    rows.append({"loop": name, "program": program, "runs": runs, "ns a run": f"{ns / runs:.0f}"})
    finally:
        STATISTICS.write_text(before_value)
    return rows


def turns_of_a_step(job: DoubleJob) -> int:
    """Returns the number of turns of the loop of arithmetic that take STEP_NS."""
    probe = 10_000_000
    return int(probe * STEP_NS / min(job.do(f"spin {probe}")[0] for _ in range(5)))


class Paced:
    """A job that is told to work for a second at a time."""

    def __init__(self, job: DoubleJob, path: Path, turns: int) -> None:
        self._job, self._path, self._turns = job, path, turns

    def step_ns(self) -> float:
        """Returns the median time of a step over hundreds of steps within a second, ns."""
        self._path.unlink(missing_ok=True)
        self._job.do(f"pace {self._turns} 1 {self._path}")
        return float(np.median(np.diff(np.fromfile(self._path, np.int64)))) / 100


def in_turn(with_it: Callable[[], float], without: Callable[[], float], blocks: int, seed: int) -> Ratio:
    chooser = random.Random(seed)
    on: list[float] = []
    off: list[float] = []
    for _ in range(blocks):
        if chooser.random() < 0.5:
            on.append(with_it())
            off.append(without())
        else:
            off.append(without())
            on.append(with_it())
    return ratio_of_blocks(on, off)


def cost_to_jobs(plain: Paced, probed: Paced, watching: Watching, blocks: int) -> list[dict[str, object]]:
    def switched(paused: bool) -> Callable[[], float]:
        def step() -> float:
            watching.session.pause(paused)
            return probed.step_ns()

        return step

    pauses = in_turn(switched(False), switched(True), blocks, 11)
    watching.session.pause(False)
    copies = in_turn(probed.step_ns, plain.step_ns, blocks, 13)
    # Two processes differ without any probe: the same comparison with the probes paused says by how much.
    watching.session.pause(True)
    idle = in_turn(probed.step_ns, plain.step_ns, blocks, 17)
    watching.session.pause(False)
    return [
        {"step of a job with 2,000 collectives/s": name, "cost": ratio.percent(), "pairs": ratio.blocks}
        for name, ratio in (
            ("probes on, against paused", pauses),
            ("probes on, against a process without", copies),
            ("probes paused, against a process without", idle),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--version", default="2.27.5")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-nccl-"))
    jobs = []
    for name in ("plain", "probed"):
        (folder / name).mkdir()
        jobs.append(DoubleJob(build(folder / name, options.version), folder / f"{name}-job", 1))
    try:
        with session_of() as session:
            watching = Watching(session, jobs)
            watching.attach(folder / "probed" / "libnccl.so.2", folder / "probed" / "libcudart.so.12")
            for job in jobs:
                job.do("init world config")
            plain, probed = jobs
            print(table(hits(plain, probed, watching, options.blocks)))
            print(table(in_programs(probed, watching, 5)))
            turns = turns_of_a_step(plain)
            paced = [Paced(job, folder / f"steps{number}", turns) for number, job in enumerate(jobs)]
            draining = Draining(watching)
            try:
                print(table(cost_to_jobs(*paced, watching, options.blocks)))
            finally:
                draining.end()
                watching.stop()
    finally:
        for job in jobs:
            job.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
