"""Cost of the daemon to a 2-rank DDP job on the CPU: ``python bench/cost_to_job.py [--rounds 60]``.

The ranks are pinned to one CPU, and the daemon with all of its processes to another, as on a node with a core to spare:
the ranks pay for the probes, the samples and shared resources. In each round, a block of steps is timed without any
daemon. Then the daemon is started, blocks are timed in turn with the daemon on and paused, and the daemon is stopped.
After the rounds, the same job is timed beside ``py-spy record`` at 100 Hz on both ranks. At last it takes turns with a
second job that has Probing inside, one job being stopped while the other is timed (left out unless ``make
probing-venv`` was run). Steps next to a switch are left out and reported apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import rivals
from running import BenchDaemon, cpu_ns, family, job
from statistics_of_blocks import ratio_of_blocks, table

HERE = Path(__file__).resolve().parent
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
MARGIN_S = 0.3
# A daemon that has just started looks at every process of the machine a few times: this is a cost of the start only.
SETTLE_S = 3.0
# The cost of a uprobe on an instruction that the kernel emulates, ns, without the work of the BPF program
# (bench/gloo_hits.py, paused).
TRAP_NS = 700
JOB_CPU, OTHER_CPU = 0, 1
Times = npt.NDArray[np.int64]
Blocks = list["Block"]


class Block(NamedTuple):
    """Step time of a block, ms. The mean includes all hiccups of the machine, whatever their cause; the median none."""

    mean: float
    median: float


@contextlib.contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """A context manager: processes that are started inside run only on this CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Job:
    """Two ranks, and the file with the end of every step of rank 0, ns."""

    ranks: list[subprocess.Popen[bytes]]
    path: Path
    seconds: float

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def between(self, begin: int, end: int) -> Times:
        times = np.fromfile(self.path, dtype=np.int64)
        return times[(times >= begin) & (times <= end)]

    def worst_ms(self, begin: int, end: int) -> float:
        return float(np.diff(self.between(begin, end)).max(initial=0)) / 1e6

    def runs(self) -> None:
        """Waits until the job has made 200 steps."""
        while not self.path.exists() or self.path.stat().st_size < 8 * 200:
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def block(self) -> tuple[Block, int, int]:
        """Returns (step time, begin, end) of a block that begins now, after a margin."""
        time.sleep(MARGIN_S)
        begin = time.monotonic_ns()
        time.sleep(self.seconds)
        end = time.monotonic_ns()
        time.sleep(MARGIN_S)
        steps = np.diff(self.between(begin, end)) / 1e6
        return Block(float(steps.mean()), float(np.median(steps))), begin, end


class Rounds:
    """Blocks of one job without a daemon, with a daemon, and with a paused daemon."""

    def __init__(self, job: Job, daemon: BenchDaemon, switches: int) -> None:
        self._job, self._daemon, self._switches = job, daemon, switches
        self._chooser = random.Random(11)
        self.absent: Blocks = []
        self.present: Blocks = []
        self.on: Blocks = []
        self.paused: Blocks = []
        self.worst: dict[str, list[float]] = {"attach": [], "detach": [], "no switch": []}
        self.cpu: list[float] = []

    def round(self) -> None:
        if self._chooser.random() < 0.5:
            self._without()
            self._with()
        else:
            self._with()
            self._without()

    def _without(self) -> None:
        block, begin, end = self._job.block()
        self.absent.append(block)
        self.worst["no switch"].append(self._job.worst_ms(begin, end))

    def _with(self) -> None:
        self._at("attach", lambda: start(self._daemon))
        time.sleep(SETTLE_S)
        on: Blocks = []
        for _ in range(self._switches):
            for paused in sorted((True, False), key=lambda _: self._chooser.random()):
                self._daemon.ctl("pause", *(() if paused else ("--resume",)))
                before = self._cpu()
                block, begin, end = self._job.block()
                (self.paused if paused else on).append(block)
                if not paused:
                    self.cpu.append((self._cpu() - before) / (end - begin + int(2 * MARGIN_S * 1e9)))
        self.on += on
        self.present.append(Block(*(statistics.fmean(values) for values in zip(*on, strict=True))))
        self._daemon.ctl("pause", "--resume")
        self._at("detach", self._daemon.stop)

    def _cpu(self) -> int:
        assert self._daemon.process is not None
        return cpu_ns(family(self._daemon.process.pid))

    def _at(self, name: str, switch: Callable[[], object]) -> None:
        begin = time.monotonic_ns()
        switch()
        time.sleep(MARGIN_S)
        self.worst[name].append(self._job.worst_ms(begin, time.monotonic_ns()))


def start(daemon: BenchDaemon) -> None:
    with on_cpu(OTHER_CPU):
        daemon.start()


@contextlib.contextmanager
def running(folder: Path, name: str, options: argparse.Namespace, python: Path | None = None) -> Iterator[Job]:
    path = folder / name
    env = {"PROBING": "1"} if python else {}
    with contextlib.ExitStack() as undo:
        with on_cpu(JOB_CPU):
            ranks = undo.enter_context(job(HERE / "timed_job.py", path, str(options.width), env=env, python=python))
        found = Job(ranks, path, options.seconds)
        found.runs()
        yield found


def beside_py_spy(plain: Job, folder: Path, rounds: int) -> tuple[Blocks, Blocks]:
    """Returns the blocks (without, with) py-spy, measured in turn."""
    without: Blocks = []
    beside: Blocks = []
    for _ in range(rounds):
        without.append(plain.block()[0])
        with on_cpu(OTHER_CPU), rivals.py_spy(plain.pids, folder):
            time.sleep(1.0)
            beside.append(plain.block()[0])
    return without, beside


def with_probing(plain: Job, probed: Job, rounds: int) -> tuple[Blocks, Blocks]:
    """Returns the blocks (without, with) Probing, measured in turn while the other job is stopped."""
    found: dict[str, Blocks] = {"plain": [], "probed": []}
    probed.signal(signal.SIGSTOP)
    for number in range(2 * rounds):
        one, other, name = (plain, probed, "plain") if number % 2 == 0 else (probed, plain, "probed")
        other.signal(signal.SIGSTOP)
        one.signal(signal.SIGCONT)
        found[name].append(one.block()[0])
    plain.signal(signal.SIGCONT)
    return found["plain"], found["probed"]


def ran() -> dict[str, tuple[int, int]]:
    """Returns (runs, ns in all runs) of each BPF program so far, by name, as the kernel counts them."""
    listed = json.loads(subprocess.check_output(["bpftool", "-j", "prog", "list"]))
    return {p["name"]: (p.get("run_cnt", 0), p.get("run_time_ns", 0)) for p in listed if "name" in p}


def calculated(daemon: BenchDaemon, plain: Job) -> list[dict[str, object]]:
    """Returns the calculated cost: hits per step times the cost of a hit. The kernel's counting itself costs time."""
    start(daemon)
    time.sleep(SETTLE_S)
    STATISTICS.write_text("1")
    begin, before = time.monotonic_ns(), ran()
    time.sleep(10)
    end, after = time.monotonic_ns(), ran()
    STATISTICS.write_text("0")
    daemon.stop()
    steps = len(plain.between(begin, end))
    rows: list[dict[str, object]] = []
    for name, (runs, spent) in sorted(after.items()):
        more = runs - before.get(name, (0, 0))[0]
        if more >= steps / 10:
            in_program = (spent - before.get(name, (0, 0))[1]) / more
            trap = 0 if name.startswith(("python_", "process_")) else TRAP_NS
            share = more * (in_program + trap) / (end - begin)
            rows.append(
                {
                    "program": name,
                    "runs a step": f"{more / steps:.1f}",
                    "ns in it": f"{in_program:.0f}",
                    "ns to get there": trap,
                    "of a step": f"{share * 100:.3f} %",
                }
            )
    return rows


def compared(pairs: Sequence[tuple[str, Blocks, Blocks]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, with_it, without in pairs:
        mean, median = (ratio_of_blocks([b[i] for b in with_it], [b[i] for b in without]) for i in (0, 1))
        rows.append(
            {"the job": name, "median step": median.percent(), "mean step": mean.percent(), "pairs": mean.blocks}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="number of rounds, each with the daemon and without")
    parser.add_argument("--switches", type=int, default=2, help="pairs of blocks (daemon on, daemon paused) in a round")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a block")
    parser.add_argument("--rivals", type=int, default=20, help="pairs of blocks with each rival")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    options = parser.parse_args()
    if not {JOB_CPU, OTHER_CPU} <= os.sched_getaffinity(0):
        raise SystemExit("this needs two CPUs: one for the ranks, one for the daemon")
    # So that jobs and daemon end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    daemon = BenchDaemon()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-steps-"))
    with contextlib.closing(daemon), running(folder, "plain", options) as plain:
        rounds = Rounds(plain, daemon, options.switches)
        for number in range(options.rounds):
            rounds.round()
            present, absent = rounds.present[-1].median, rounds.absent[-1].median
            print(f"round {number + 1}: {present:.3f} ms, {absent:.3f} without", flush=True)
        pairs = [
            ("probingd, on against paused", rounds.on, rounds.paused),
            ("probingd, there against absent", rounds.present, rounds.absent),
        ]
        programs = calculated(daemon, plain)
        if options.rivals:
            without, beside = beside_py_spy(plain, folder, options.rivals)
            pairs.append(("py-spy record 100 Hz, both ranks", beside, without))
            if reason := rivals.probing_reason():
                print(f"not beside Probing: {reason}")
            else:
                with running(folder, "probed", options, rivals.PROBING) as probed:
                    without, beside = with_probing(plain, probed, options.rivals)
                pairs.append(("Probing 0.2.4 in both ranks", beside, without))
    print(table(compared(pairs)))
    print(table(programs))
    print(f"step without: median of blocks {statistics.median(b.median for b in rounds.absent):.3f} ms")
    print(f"daemon CPU, all processes, at this load: {statistics.mean(rounds.cpu) * 100:.2f} % of a core")
    for name, values in rounds.worst.items():
        print(f"worst step, {name}: median {statistics.median(values):.1f} ms, max {max(values):.1f} ms")


if __name__ == "__main__":
    main()
