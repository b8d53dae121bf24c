"""What the daemon costs a 2-rank DDP job on the CPU: ``python bench/cost_to_job.py [--pairs 30]``.

Blocks with and without the daemon (started and stopped for real) alternate within one run of one job; so do blocks
beside ``py-spy record`` at 100 Hz on both ranks. Steps next to a switch are left out of the ratio and reported apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from running import BIN, BenchDaemon, cpu_ns, job, tree
from statistics_of_blocks import ratio_of_blocks, table

HERE = Path(__file__).resolve().parent
MARGIN_S = 0.3
# A daemon that has just started looks at every process of the machine a few times: that is start-up, not its cost.
SETTLE_S = 6.0
# A uprobe on an instruction that the kernel emulates, without a program's own work (tests/kernel, ebpf: 0.7 us).
TRAP_NS = 700
Times = npt.NDArray[np.int64]


class Block(NamedTuple):
    """Step time of a block, ms. The mean has all hiccups of the machine in it, whoever makes them; the median none."""

    mean: float
    median: float


class Steps:
    """The end of every step of rank 0, ns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def between(self, begin: int, end: int) -> Times:
        times = np.fromfile(self._path, dtype=np.int64)
        return times[(times >= begin) & (times <= end)]

    def of_block(self, begin: int, end: int) -> Block:
        steps = np.diff(self.between(begin, end)) / 1e6
        return Block(float(steps.mean()), float(np.median(steps)))

    def worst_ms(self, begin: int, end: int) -> float:
        return float(np.diff(self.between(begin, end)).max(initial=0)) / 1e6


@contextlib.contextmanager
def py_spy(pids: list[int], folder: Path) -> Iterator[None]:
    running = [
        subprocess.Popen(
            [
                BIN / "py-spy",
                "record",
                "--rate",
                "100",
                "--nonblocking",
                "-d",
                "3600",
                "-f",
                "raw",
                "-o",
                folder / f"{pid}.txt",
                "-p",
                str(pid),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for pid in pids
    ]
    try:
        yield
    finally:
        for process in running:
            process.send_signal(2)
            process.wait()


def measure(steps: Steps, seconds: float) -> tuple[Block, int, int]:
    """(step time, begin, end) of a block that begins now, behind a margin."""
    time.sleep(MARGIN_S)
    begin = time.monotonic_ns()
    time.sleep(seconds)
    end = time.monotonic_ns()
    time.sleep(MARGIN_S)
    return steps.of_block(begin, end), begin, end


def gloo_programs() -> tuple[int, int]:
    """(hits, ns spent in them) of all programs on gloo so far, by the kernel's count."""
    listed = json.loads(subprocess.check_output(["bpftool", "-j", "prog", "list"]))
    gloo = [p for p in listed if p.get("name", "").startswith("gloo_")]
    return sum(p.get("run_cnt", 0) for p in gloo), sum(p.get("run_time_ns", 0) for p in gloo)


def calculated(daemon: BenchDaemon, steps: Steps, ranks: int) -> None:
    """The cost by calculation: hits a step times what one costs, and the daemon's CPU."""
    switch = Path("/proc/sys/kernel/bpf_stats_enabled")
    daemon.start()
    time.sleep(SETTLE_S)
    assert daemon.process is not None
    pids = tree(daemon.process.pid)
    switch.write_text("1")
    begin, cpu, (hits, spent) = time.monotonic_ns(), cpu_ns(pids), gloo_programs()
    time.sleep(10)
    end, cpu_after, (hits_after, spent_after) = time.monotonic_ns(), cpu_ns(pids), gloo_programs()
    switch.write_text("0")
    daemon.stop()
    count = len(steps.between(begin, end))
    each = (hits_after - hits) / count / ranks
    program_ns = (spent_after - spent) / max(hits_after - hits, 1)
    share = each * (program_ns + TRAP_NS) / ((end - begin) / count)
    core = (cpu_after - cpu) / (end - begin)
    print(f"hits a step and rank: {each:.1f}, {program_ns:.0f} ns in the program and {TRAP_NS} ns to get there")
    print(f"by calculation: probes {share * 100:.3f} % of a step, daemon {core * 100:.2f} % of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a block")
    parser.add_argument("--py-spy-pairs", type=int, default=10)
    parser.add_argument("--width", type=int, default=512, help="of the model")
    options = parser.parse_args()
    chooser = random.Random(11)
    daemon = BenchDaemon()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-steps-"))
    on: list[Block] = []
    off: list[Block] = []
    spied: list[Block] = []
    unspied: list[Block] = []
    worst: dict[str, list[float]] = {"attach": [], "detach": [], "no switch": []}
    cpu: list[float] = []
    with job(HERE / "timed_job.py", folder / "steps", str(options.width)) as ranks:
        steps = Steps(folder / "steps")
        while not (folder / "steps").exists() or (folder / "steps").stat().st_size < 8 * 200:
            time.sleep(0.1)

        def block_off() -> Block:
            block, begin, end = measure(steps, options.seconds)
            worst["no switch"].append(steps.worst_ms(begin, end))
            return block

        def block_on() -> Block:
            begin = time.monotonic_ns()
            daemon.start()
            time.sleep(MARGIN_S)
            worst["attach"].append(steps.worst_ms(begin, time.monotonic_ns()))
            time.sleep(SETTLE_S)
            assert daemon.process is not None
            pids = tree(daemon.process.pid)
            before = cpu_ns(pids)
            block, first, last = measure(steps, options.seconds)
            cpu.append((cpu_ns(pids) - before) / (last - first))
            begin = time.monotonic_ns()
            daemon.stop()
            time.sleep(MARGIN_S)
            worst["detach"].append(steps.worst_ms(begin, time.monotonic_ns()))
            return block

        for number in range(options.pairs):
            first_on = chooser.random() < 0.5
            if first_on:
                on.append(block_on())
            off.append(block_off())
            if not first_on:
                on.append(block_on())
            print(f"pair {number + 1}: on {on[-1].median:.3f} ms, off {off[-1].median:.3f} ms", flush=True)
        for _ in range(options.py_spy_pairs):
            unspied.append(block_off())
            with py_spy([r.pid for r in ranks], folder):
                time.sleep(1.0)
                spied.append(measure(steps, options.seconds)[0])
        calculated(daemon, steps, len(ranks))
    daemon.close()
    rows = []
    for name, with_it, without in (
        ("probingd, all default sources", on, off),
        ("py-spy record 100 Hz, both ranks", spied, unspied),
    ):
        mean, median = (ratio_of_blocks([b[i] for b in with_it], [b[i] for b in without]) for i in (0, 1))
        rows.append(
            {"beside the job": name, "median step": median.percent(), "mean step": mean.percent(), "pairs": mean.blocks}
        )
    print(table(rows))
    print(f"step without: median of blocks {statistics.median(b.median for b in off):.3f} ms")
    print(f"daemon CPU, all processes, at this load: {statistics.mean(cpu) * 100:.2f} % of a core")
    for name, values in worst.items():
        print(f"worst step, {name}: median {statistics.median(values):.1f} ms, max {max(values):.1f} ms")


if __name__ == "__main__":
    main()
