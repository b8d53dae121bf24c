"""CPU and memory of all processes of the daemon beside 8 ranks that step, hang, or serve, and without any job.

Each state is measured for ``--seconds`` after it has lasted a while. A hang is measured after 40 s, and again after 5
minutes, when the diagnosis reads the job as rarely as after an hour. The second measurement takes 5 minutes, so that it
contains one full reading. All default sources are on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
from running import BenchDaemon, arguments, family, job, pss_bytes
from statistics_of_blocks import table

# The begin of the ranks' script; each state adds its own end. A rank writes its file once it has made 40 steps.
STEPS = """
import signal, socket, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, begin = dist.get_rank(), time.monotonic()

def step(number):
    time.sleep(max(0.0, begin + number / 40 - time.monotonic()))
    dist.all_reduce(torch.ones(1024))

for number in range(1, 41):
    step(number)
open(sys.argv[1] + str(rank), "w").close()
"""
GOES_ON = """
while True:
    number += 1
    step(number)
"""
HANGS = """
if rank == 7:
    time.sleep(1e6)
dist.all_reduce(torch.ones(1024))
"""
SERVES = """
if rank == 0:
    socket.create_server(("127.0.0.1", 0)).accept()
dist.broadcast(torch.ones(1024), src=0)
"""


class State(NamedTuple):
    """A state of the job. ``end``: the last part of the ranks' script; empty: there is no job. ``settle_s``: how long
    the state lasts before the measurement. ``least_s``: the minimum duration of the measurement.
    """

    end: str
    settle_s: float
    least_s: float = 0.0


STATES = {
    "no job": State("", 40),
    "40 steps/s": State(GOES_ON, 40),
    "hung for a minute": State(HANGS, 40),
    "hung for long": State(HANGS, 300, 300),
    "idle server": State(SERVES, 120, 300),
}
RANKS = 8
ENDED = "ended processes"


class Usage(NamedTuple):
    """Processes of one module: their total CPU, % of a core, and the PSS of each process, bytes."""

    cpu: float
    pss: list[int]


def module_of(pid: int) -> str:
    argv = arguments(pid)
    return argv[argv.index("-m") + 1] if "-m" in argv else "supervisor"


def measure(state: State, seconds: float) -> tuple[dict[str, Usage], dict[str, float]]:
    """Returns the usage by module, and the CPU of each thread of the collector, % of a core."""
    folder = tempfile.mkdtemp(prefix="probingd-bench-")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(contextlib.closing(BenchDaemon()))
        daemon.start()
        if state.end:
            stack.enter_context(job("-c", STEPS + state.end, f"{folder}/rank", ranks=RANKS))
            while len(list(Path(folder).glob("rank*"))) < RANKS:
                time.sleep(0.2)
        time.sleep(state.settle_s)
        assert daemon.process is not None
        before, threads = Tree.of(daemon.process.pid), threads_of(family(daemon.process.pid))
        begin = time.monotonic_ns()
        time.sleep(max(seconds, state.least_s))
        elapsed = time.monotonic_ns() - begin
        tree = Tree.of(daemon.process.pid)
        pss: dict[str, list[int]] = collections.defaultdict(list)
        for pid, name in tree.names.items():
            pss[name].append(pss_bytes(pid))
        after = threads_of(tree.names)
    spent = {name: (ns - threads.get(name, 0)) / elapsed * 100 for name, ns in after.items()}
    cpu = tree.since(before)
    return {name: Usage(cpu[name] / elapsed * 100, pss[name]) for name in {**pss, **cpu}}, spent


class Tree(NamedTuple):
    """Processes at a moment: their modules and CPU time, ns; ``ended``: CPU time of children that were waited for."""

    names: dict[int, str]
    cpu: dict[int, int]
    ended: int

    @classmethod
    def of(cls, root: int) -> Tree:
        names, cpu, ended = {}, {}, 0
        for pid in family(root):
            with contextlib.suppress(psutil.Error):
                spent = psutil.Process(pid).cpu_times()
                names[pid], cpu[pid] = module_of(pid), round((spent.user + spent.system) * 1e9)
                ended += round((spent.children_user + spent.children_system) * 1e9)
        return cls(names, cpu, ended)

    def since(self, before: Tree) -> dict[str, int]:
        """Returns the CPU time since ``before`` by module, ns; processes that ended meanwhile count as ENDED."""
        found: dict[str, int] = collections.defaultdict(int)
        for pid, ns in self.cpu.items():
            found[self.names[pid]] += ns - before.cpu.get(pid, 0)
        gone = sum(ns for pid, ns in before.cpu.items() if pid not in self.cpu)
        if lost := self.ended - before.ended - gone:
            found[ENDED] = lost
        return found


def threads_of(pids: Iterable[int]) -> dict[str, int]:
    """Returns the CPU time of the collector's threads so far, ns, by the threads' names in the kernel."""
    found: dict[str, int] = collections.defaultdict(int)
    for pid in [pid for pid in pids if module_of(pid) == "probing.daemon.collector"]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            found[f"{name} {task.name}"] += int((task / "schedstat").read_text().split()[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", choices=STATES)
    options = parser.parse_args()
    for name in [options.only] if options.only else STATES:
        found, threads = measure(STATES[name], options.seconds)
        rows = [
            {
                "process": module,
                "count": len(usage.pss),
                "CPU, % of a core": f"{usage.cpu:.2f}",
                "PSS each, MB": ", ".join(f"{m / 1e6:.0f}" for m in usage.pss),
            }
            for module, usage in sorted(found.items())
        ]
        rows.append(
            {
                "process": "all",
                "count": sum(len(u.pss) for u in found.values()),
                "CPU, % of a core": f"{sum(u.cpu for u in found.values()):.2f}",
                "PSS each, MB": f"{sum(sum(u.pss) for u in found.values()) / 1e6:.0f} in sum",
            }
        )
        print(f"\n{name}:\n{table(rows)}")
        busy = sorted(threads.items(), key=lambda item: -item[1])[:8]
        print(
            "collector by thread, % of a core:", ", ".join(f"{thread} {share:.2f}" for thread, share in busy if share)
        )


if __name__ == "__main__":
    main()
