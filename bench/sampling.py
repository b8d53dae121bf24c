"""Cost of samples to the sampled process: ``python bench/sampling.py --target python`` (or ``ddp``).

One daemon runs all the time; its sampler is switched between rates, and off, from block to block, in a random order
for each round. A ratio compares a block with the unsampled blocks of its round. Then each rate runs
for a while with the kernel's own count of time in programs (kernel.bpf_stats_enabled, which has a cost itself).
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
from cost_to_job import Job
from rivals import py_spy
from running import BenchDaemon, cpu_ns, family, job, node_channel, set_config
from statistics_of_blocks import ratio_of_blocks, table

from probing.api.proto.probing.v1 import node_pb2_grpc

HERE = Path(__file__).resolve().parent
SWITCH_S = 0.25
STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
PROGRAMS = ("python_on_cpu", "python_switch")


class Rate(NamedTuple):
    name: str
    hz: int
    off_cpu: bool


OFF = Rate("not sampled", 0, False)
RATES = [Rate(f"{hz} Hz{', off CPU too' if off else ''}", hz, off) for hz in (19, 99, 999) for off in (False, True)]
SPIED = "py-spy record 100 Hz"


class Block(NamedTuple):
    """Times of a step, ms: mean and median by the clock, and the CPU time of all ranks as the scheduler counts it."""

    mean: float
    median: float
    cpu: float


class Bench:
    def __init__(self, target: Job, stub: node_pb2_grpc.NodeStub) -> None:
        self._target = target
        self._pids = target.pids
        self._stub = stub
        self._seconds = target.seconds

    def switch(self, rate: Rate) -> None:
        set_config(self._stub, sampling_off_cpu=str(rate.off_cpu).lower(), sampling_hz=str(rate.hz))
        time.sleep(SWITCH_S)

    def block(self) -> Block:
        begin, cpu = time.monotonic_ns(), cpu_ns(self._pids)
        time.sleep(self._seconds)
        end, cpu_after = time.monotonic_ns(), cpu_ns(self._pids)
        times = self._target.between(begin, end)
        each = np.diff(times) / 1e6
        # The CPU time covers the whole block, including incomplete steps at its edges.
        passed = (end - begin) / 1e6 / float(each.mean())
        return Block(float(each.mean()), float(np.median(each)), (cpu_after - cpu) / 1e6 / passed)

    def rounds(self, count: int) -> dict[str, tuple[list[Block], list[Block]]]:
        """Returns for each rate its blocks, and for each such block the mean of the unsampled blocks of its round."""
        chooser = random.Random(3)
        found: dict[str, tuple[list[Block], list[Block]]] = {r.name: ([], []) for r in RATES}
        for number in range(count):
            order = chooser.sample([*RATES, OFF, OFF, OFF], len(RATES) + 3)
            blocks = []
            for rate in order:
                self.switch(rate)
                blocks.append((rate, self.block()))
            without = Block(*(statistics.mean(b[i] for r, b in blocks if r is OFF) for i in range(3)))
            for rate, block in blocks:
                if rate is not OFF:
                    found[rate.name][0].append(block)
                    found[rate.name][1].append(without)
            print(f"round {number + 1}: not sampled {without.mean:.3f} ms, {without.cpu:.3f} ms of CPU", flush=True)
        self.switch(OFF)
        return found

    def spied(self, pairs: int, folder: Path) -> tuple[list[Block], list[Block]]:
        """Returns the blocks beside py-spy, and the block before each."""
        self.switch(OFF)
        with_it, without = [], []
        for _ in range(pairs):
            without.append(self.block())
            with py_spy(self._pids, folder):
                time.sleep(1.0)
                with_it.append(self.block())
            time.sleep(SWITCH_S)
        return with_it, without

    def counted(self, rate: Rate, daemon: BenchDaemon, seconds: float) -> dict[str, object]:
        """Returns the time in the kernel's programs and in the daemon at a rate."""
        self.switch(rate)
        time.sleep(1.0)
        assert daemon.process is not None
        pids = family(daemon.process.pid)
        with kernel_counts():
            begin, cpu, before = time.monotonic_ns(), cpu_ns(pids), programs(pids)
            time.sleep(seconds)
            elapsed, after = (time.monotonic_ns() - begin) / 1e9, programs(pids)
            core = (cpu_ns(pids) - cpu) / elapsed / 1e7
        row: dict[str, object] = {"sampled at": rate.name}
        for name in PROGRAMS:
            runs, spent = (after[name][i] - before[name][i] for i in (0, 1))
            row[f"{name}, runs/s"] = f"{runs / elapsed:.0f}"
            row["ns each" if name == PROGRAMS[0] else "ns each "] = f"{spent / runs:.0f}" if runs else "-"
            row[f"{name}, % of a core"] = f"{spent / elapsed / 1e7:.3f}"
        return {**row, "daemon, % of a core": f"{core:.2f}"}


@contextlib.contextmanager
def kernel_counts() -> Iterator[None]:
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        yield
    finally:
        STATS.write_text(before)


def programs(pids: list[int]) -> dict[str, tuple[int, int]]:
    """Returns (runs, ns) of each of the sampler's programs so far, in this daemon only."""
    held = set()
    for file in (f for pid in pids for f in Path(f"/proc/{pid}/fdinfo").glob("*")):
        with contextlib.suppress(OSError):
            held |= {int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("prog_id:")}
    listed = json.loads(subprocess.check_output(["bpftool", "-j", "prog", "list"]))
    ours = [p for p in listed if p["id"] in held]
    named = {n: [p for p in ours if p.get("name") == n] for n in PROGRAMS}
    return {n: (sum(p.get("run_cnt", 0) for p in f), sum(p.get("run_time_ns", 0) for p in f)) for n, f in named.items()}


def row_of(name: str, with_it: list[Block], without: list[Block]) -> dict[str, object]:
    ratios = [ratio_of_blocks([b[i] for b in with_it], [b[i] for b in without]) for i in range(3)]
    mean, median, cpu = (r.percent() for r in ratios)
    return {"sampled": name, "CPU time a step": cpu, "median step": median, "mean step": mean, "blocks": len(with_it)}


def per_tick(name: str, hz: int, with_it: list[Block], without: list[Block]) -> str:
    """Extrapolates from a measurable rate to the cost of 19 and 99 Hz."""
    r = ratio_of_blocks([b.cpu for b in with_it], [b.cpu for b in without])
    us = [(x - 1) * 1e6 / hz for x in (r.ratio, r.low, r.high)]
    parts = [f"{to} Hz {us[0] * to / 1e4:.3f} % [{us[1] * to / 1e4:.3f}, {us[2] * to / 1e4:.3f}]" for to in (19, 99)]
    return f"by {name}: a tick costs {us[0]:.1f} us [{us[1]:.1f}, {us[2]:.1f}] of the target's CPU; {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("python", "ddp"), default="python")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a block")
    parser.add_argument("--py-spy-pairs", type=int, default=10)
    parser.add_argument("--count-seconds", type=float, default=6.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-steps-"))
    marks = folder / "steps"
    programs_of = {"python": [HERE / "deep_python.py", "work", marks], "ddp": [HERE / "timed_job.py", marks, "512"]}
    daemon = BenchDaemon()
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.close)
        ranks = ends.enter_context(job(*programs_of[options.target], ranks=2 if options.target == "ddp" else 1))
        daemon.start()
        while not marks.exists() or marks.stat().st_size < 8 * 40:
            time.sleep(0.1)
        # A daemon that has just started looks at every process a few times.
        time.sleep(6.0)
        stub = ends.enter_context(node_channel(daemon))
        bench = Bench(Job(ranks, marks, options.seconds), stub)
        found = bench.rounds(options.rounds)
        found[SPIED] = bench.spied(options.py_spy_pairs, folder)
        counts = [bench.counted(rate, daemon, options.count_seconds) for rate in (OFF, *RATES)]
    print(table([row_of(name, *blocks) for name, blocks in found.items() if blocks[0]]))
    print(table(counts))
    for rate in RATES:
        if rate.hz == RATES[-1].hz:
            print(per_tick(rate.name, rate.hz, *found[rate.name]))


if __name__ == "__main__":
    main()
