"""What it costs to know who a process is: one look at a rank, and the looks at ranks that train, from their start on.

One look: all that the identity is made of, with and without the environment in memory, and psutil asked for the same
files, in turn. Then a job of two ranks over gloo starts beside a discovery with real readers: how often a reader looked
at them while they started, and how often in the minute after that. Budget: no look at a rank that is known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from host_polling import Counted, Reader
from statistics_of_blocks import table

from probing.daemon.clock import SystemClock
from probing.daemon.ipc import Message
from probing.daemon.processes import target
from probing.daemon.processes.discovery import Discovery

ROUNDS = 200
START_S, REST_S = 20.0, 60.0
_JOB = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(7))
print("ready", flush=True)
time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rest", type=float, default=REST_S, help="seconds after the start")
    rest = parser.parse_args().rest
    reader = Counting()
    discovery = Discovery(reader, Counted(), SystemClock(), "bench", rescan_s=30.0)  # type: ignore[arg-type]
    discovery.start()
    discovery.scanned(60)
    with job() as pids:
        time.sleep(START_S)
        first = reader.looks(pids)
        time.sleep(rest)
        later = reader.looks(pids) - first
        known = [who.rank for who in discovery.live() if who.pid in pids]
        print(table(one_look(pids[0])))
    discovery.stop()
    rows = [
        {"time": f"first {START_S:.0f} s", "looks at a rank": first / len(pids), "ranks known": json.dumps(known)},
        {"time": f"next {rest:.0f} s", "looks at a rank": later / len(pids), "ranks known": json.dumps(known)},
    ]
    print(table(rows))


class Counting(Reader):
    """A reader that counts the looks at each process."""

    def __init__(self) -> None:
        super().__init__()
        self._looks: Counter[int] = Counter()

    def call(self, op: str, *, timeout: float = 20.0, patience: float | None = None, **args: Any) -> Message:
        if op == "identity":
            self._looks[args["pid"]] += 1
        return super().call(op, timeout=timeout, patience=patience, **args)

    def looks(self, pids: list[int]) -> int:
        return sum(self._looks[pid] for pid in pids)


@contextmanager
def job() -> Iterator[list[int]]:
    """Two ranks that have joined, and wait."""
    master = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29477", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(_JOB)
        ranks = [
            subprocess.Popen(
                [sys.executable, script], env={**os.environ, **master, "RANK": str(rank)}, stdout=subprocess.PIPE
            )
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.stdout
            rank.stdout.readline()
        yield [rank.pid for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.communicate()


def one_look(pid: int) -> list[dict[str, object]]:
    """Returns the median times of a look, in turn."""
    steps: dict[str, Callable[[], object]] = {
        "with the environment in memory": lambda: _identity(pid),
        "without": lambda: _without_memory(pid),
        "psutil": lambda: _psutil(pid),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"one look at a rank": name, "ms": f"{value * 1e3:.2f}", "ratio": f"{value / medians['without']:.2f}"}
        for name, value in medians.items()
    ]


def _identity(pid: int) -> object:
    with target.Target(pid) as one:
        return target.identity(one)


def _without_memory(pid: int) -> object:
    kept, target._variables = target._variables, lambda *_: None  # type: ignore[assignment]
    try:
        return _identity(pid)
    finally:
        target._variables = kept


def _psutil(pid: int) -> object:
    process = psutil.Process(pid)
    parents = process.parents()
    return (process.exe(), process.cmdline(), process.environ(), process.uids(), process.memory_maps(), parents)


if __name__ == "__main__":
    main()
