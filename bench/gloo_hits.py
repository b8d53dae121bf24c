"""What the probes on gloo cost a collective: ``python bench/gloo_hits.py [--blocks 30]``.

One process makes all_reduces in a group of itself, pinned to one CPU with its gloo threads, so that all that the probes
cost shows in the time of a call. Blocks with the probes on, with them paused and without any are taken in turn. Before
each call the process goes through more memory than the second-level cache holds, as a training step does ("cold"),
or through none ("warm"). Beside it, the kernel's own account of the time in each program.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nccl_hits import STATISTICS, programs, session_of
from statistics_of_blocks import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from probing.daemon.bpf.elf import Symbol, find_symbols
from probing.daemon.bpf.session import Session
from probing.daemon.nccl_uprobes.source import OBJECTS, CollectivesSource
from probing.daemon.source import Identity

HERE = Path(__file__).resolve().parent
# Bytes that a process goes through before each call, and calls of a block.
LOADS = {"warm": (0, 2000), "cold": (8 << 20, 300)}


class Nobody:
    """``Processes`` without any."""

    def identity(self, pid: int, start_ns: int, timeout: float = 0.0) -> Identity | None:
        del pid, start_ns, timeout
        return None


class GlooJob:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "gloo_job.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )  # fmt: skip
        assert self._process.stdout
        self.pid = int(self._process.stdout.readline())

    @property
    def library(self) -> Path:
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return next(Path(line.split()[-1]) for line in maps if line.endswith("libtorch_cpu.so"))

    def call_ns(self, count: int, size: int) -> float:
        """The median of ``count`` all_reduces, ns."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{count} {size}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline().split()[0])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Probes:
    """The probes on the job's library, which can be placed, paused and taken away."""

    def __init__(self, session: Session, library: Path) -> None:
        self.session, self._path = session, library
        self._library = os.open(library, os.O_RDONLY)
        self._known: dict[tuple[str, ...], list[Symbol]] = {}

    def _symbols(self, fd: int, patterns: Sequence[str]) -> list[Symbol]:
        key = tuple(patterns)
        if key not in self._known:
            self._known[key] = find_symbols(fd, patterns)
        return self._known[key]

    def be(self, how: str) -> None:
        """"on", "paused", or "none": not there."""
        for link in list(self.session.links.values()):
            self.session.detach(link)
        self.session.pause(how == "paused")
        if how != "none":
            source = CollectivesSource(self.session, Nobody(), "bench", self._symbols)
            source.start()
            source.attach(self._library, os.fsencode(self._path))

    def drain(self) -> int:
        """How many operations there were."""
        ring = self.session.rings["collectives"]
        found = ring.drain()
        ring.commit(found.position)
        return len(found.records)


def measure(job: GlooJob, probes: Probes, load: str, blocks: int) -> list[dict[str, object]]:
    size, count = LOADS[load]
    chooser = random.Random(11)
    took: dict[str, list[float]] = {"none": [], "paused": [], "on": []}
    seen = 0
    for _ in range(blocks):
        ways = list(took)
        chooser.shuffle(ways)
        for way in ways:
            probes.be(way)
            job.call_ns(20, size)
            probes.drain()
            took[way].append(job.call_ns(count, size))
            seen += probes.drain()
    if seen != blocks * count:
        raise SystemExit(f"{seen} operations were seen of {blocks * count}")
    rows: list[dict[str, object]] = []
    for way in ("paused", "on"):
        cost = np.asarray(took[way]) - np.asarray(took["none"])
        chosen = np.random.default_rng(7).choice(cost, (10_000, blocks))
        low, high = np.percentile(np.median(chosen, axis=1), [2.5, 97.5])
        rows.append(
            {
                "caches": load,
                "probes": way,
                "an all_reduce without, us": f"{statistics.median(took['none']) / 1000:.1f}",
                "with, us": f"{statistics.median(took[way]) / 1000:.1f}",
                "cost, us": f"{np.median(cost) / 1000:.2f} [{low / 1000:.2f}, {high / 1000:.2f}]",
            }
        )
    return rows


def in_programs(job: GlooJob, probes: Probes, load: str) -> list[dict[str, object]]:
    """By the kernel's account, which costs time itself."""
    size, count = LOADS[load]
    probes.be("on")
    before_value = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        job.call_ns(20, size)
        before = programs(probes.session)
        job.call_ns(count, size)
        after = programs(probes.session)
    finally:
        STATISTICS.write_text(before_value)
    rows: list[dict[str, object]] = []
    for name, (runs, spent) in after.items():
        if more := runs - before[name][0]:
            mean = (spent - before[name][1]) / more
            rows.append({"caches": load, "program": name, "hits a call": more / count, "ns a hit": f"{mean:.0f}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    options = parser.parse_args()
    job = GlooJob()
    try:
        with session_of(OBJECTS) as session:
            probes = Probes(session, job.library)
            print(table([row for load in LOADS for row in measure(job, probes, load, options.blocks)]))
            print(table([row for load in LOADS for row in in_programs(job, probes, load)]))
    finally:
        job.close()


if __name__ == "__main__":
    main()
