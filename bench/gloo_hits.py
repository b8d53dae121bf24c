"""Cost of the probes on gloo to a collective: ``python bench/gloo_hits.py [--blocks 30] [--against FOLDER]``.

One process makes all_reduces in a group of itself. It is pinned to one CPU with its gloo threads, so that all of the
cost shows in the time of a call. Blocks with the probes on, paused and absent alternate. Before each call the process
reads more memory than the caches hold ("cold"), or none ("warm"); a training step lies between the two. The kernel's
own count of the time in each BPF program is printed as well. ``--against`` also measures the objects of another build,
made by ``python -m probing.daemon.bpf.build FOLDER``, in the same turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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

from probing.daemon.bpf.session import Session
from probing.daemon.elf.symbols import Symbol, find_symbols
from probing.daemon.nccl_uprobes.operations.source import OBJECTS, CollectivesSource
from probing.daemon.source import Identity

HERE = Path(__file__).resolve().parent
# (bytes that the process reads before each call, calls of a block).
LOADS = {"warm": (0, 2000), "cold": (64 << 20, 100)}


class Nobody:
    """``Processes`` that knows no process."""

    def identity(self, pid: int, start_ns: int, timeout: float = 0.0) -> Identity | None:
        del pid, start_ns, timeout
        return None


class GlooJob:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "gloo_job.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )
        assert self._process.stdout
        self.pid = int(self._process.stdout.readline())

    @property
    def library(self) -> Path:
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return next(Path(line.split()[-1]) for line in maps if line.endswith("libtorch_cpu.so"))

    def call_ns(self, count: int, size: int) -> float:
        """Returns the median time of ``count`` all_reduces, ns."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{count} {size}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline().split()[0])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Probes:
    """The probes of one build on the job's library, which can be placed, paused and taken away."""

    def __init__(self, session: Session, library: Path) -> None:
        self.session, self._path = session, library
        self._library = os.open(library, os.O_RDONLY)

    def be(self, how: str) -> None:
        """Puts the probes into a state: "on", "paused", or "none" (detached)."""
        for link in list(self.session.links.values()):
            self.session.detach(link)
        self.session.pause(how == "paused")
        if how != "none":
            source = CollectivesSource(self.session, Nobody(), "bench", _symbols)
            source.start()
            source.attach(self._library, os.fsencode(self._path))

    def drain(self) -> int:
        """Returns the number of operations."""
        ring = self.session.rings["collectives"]
        found = ring.drain()
        ring.commit(found.position)
        return len(found.records)


@functools.cache
def _found(fd: int, patterns: tuple[str, ...]) -> list[Symbol]:
    return find_symbols(fd, patterns)


def _symbols(fd: int, patterns: Sequence[str]) -> list[Symbol]:
    return _found(fd, tuple(patterns))


# The measured cases: name -> probes and their state.
Ways = dict[str, tuple[Probes, str]]


def measure(job: GlooJob, ways: Ways, load: str, blocks: int) -> list[dict[str, object]]:
    size, count = LOADS[load]
    chooser = random.Random(11)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        order = list(ways.items())
        chooser.shuffle(order)
        for name, (probes, how) in order:
            probes.be(how)
            job.call_ns(20, size)
            probes.drain()
            took[name].append(job.call_ns(count, size))
            seen = probes.drain()
            if seen != (count if how == "on" else 0):
                raise SystemExit(f"{name}: {seen} operations were seen of {count}")
            probes.be("none")
    rows: list[dict[str, object]] = []
    for name in list(ways)[1:]:
        cost = np.asarray(took[name]) - np.asarray(took["none"])
        chosen = np.random.default_rng(7).choice(cost, (10_000, blocks))
        low, high = np.percentile(np.median(chosen, axis=1), [2.5, 97.5])
        rows.append(
            {
                "caches": load,
                "probes": name,
                "an all_reduce without, us": f"{statistics.median(took['none']) / 1000:.1f}",
                "with, us": f"{statistics.median(took[name]) / 1000:.1f}",
                "cost, us": f"{np.median(cost) / 1000:.2f} [{low / 1000:.2f}, {high / 1000:.2f}]",
            }
        )
    return rows


def in_programs(job: GlooJob, ways: Ways, load: str) -> list[dict[str, object]]:
    """Returns the times in the BPF programs as the kernel counts them; the counting itself costs time."""
    size, count = LOADS[load]
    rows: list[dict[str, object]] = []
    before_value = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        for way, (probes, how) in ways.items():
            if how != "on":
                continue
            probes.be(how)
            job.call_ns(20, size)
            before = programs(probes.session)
            job.call_ns(4 * count, size)
            after = programs(probes.session)
            probes.be("none")
            probes.drain()
            row: dict[str, object] = {"caches": load, "probes": way}
            for name, (runs, spent) in after.items():
                if runs > before[name][0]:
                    row[f"{name}, ns"] = f"{(spent - before[name][1]) / (runs - before[name][0]):.0f}"
            rows.append(row)
    finally:
        STATISTICS.write_text(before_value)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--against", type=Path, help="folder of another build's objects")
    options = parser.parse_args()
    job = GlooJob()
    with contextlib.ExitStack() as undo:
        undo.callback(job.close)
        own = Probes(undo.enter_context(session_of(OBJECTS)), job.library)
        ways: Ways = {"none": (own, "none"), "paused": (own, "paused"), "on": (own, "on")}
        if options.against:
            objects = [options.against / f"{name}.bpf.o" for name in OBJECTS]
            ways["on, the other build"] = (Probes(undo.enter_context(session_of(objects)), job.library), "on")
        for load in LOADS:
            print(table(measure(job, ways, load, options.blocks)))
            print(table(in_programs(job, ways, load)))


if __name__ == "__main__":
    main()
