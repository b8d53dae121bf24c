"""CPU and memory of all processes of the daemon beside ranks that wait, and beside a job of 40 steps per second.

The ranks of that job have a data loader each, so four processes are sampled. All default sources are on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from running import BenchDaemon, arguments, cpu_ns, family, job, pss_bytes
from statistics_of_blocks import table

WAITING = """
import signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open(sys.argv[1] + str(dist.get_rank()), "w").close()
signal.pause()
"""
STEPPING = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
points = TensorDataset(torch.randn(1 << 16, 64))
begin, step = time.monotonic(), 0
while True:
    for (batch,) in DataLoader(points, 32, num_workers=1, persistent_workers=True):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 40:
            open(sys.argv[1] + str(dist.get_rank()), "w").close()
        time.sleep(max(0.0, begin + step / 40 - time.monotonic()))
"""
# New processes are looked at often for half a minute.
SETTLE_S = 40
SITUATIONS = {"rest": (WAITING, 8), "job": (STEPPING, 2)}


class Usage(NamedTuple):
    """Processes of one module: CPU in % of a core in sum, PSS of each in bytes."""

    cpu: float
    pss: list[int]


def module_of(pid: int) -> str:
    argv = arguments(pid)
    return argv[argv.index("-m") + 1] if "-m" in argv else "supervisor"


def measure(situation: str, seconds: float) -> tuple[dict[str, Usage], dict[str, float]]:
    """By module; and the threads of the collector, % of a core each."""
    script, ranks = SITUATIONS[situation]
    folder = tempfile.mkdtemp(prefix="probingd-bench-")
    with contextlib.closing(BenchDaemon()) as daemon, job("-c", script, f"{folder}/rank", ranks=ranks):
        while len(list(Path(folder).glob("rank*"))) < ranks:
            time.sleep(0.2)
        daemon.start()
        daemon.ctl("query", "SELECT count(*) FROM comm.ops")
        time.sleep(SETTLE_S)
        assert daemon.process is not None
        pids = family(daemon.process.pid)
        names = {pid: module_of(pid) for pid in pids}
        before, threads = {pid: cpu_ns([pid]) for pid in pids}, threads_of(names)
        begin = time.monotonic_ns()
        time.sleep(seconds)
        elapsed = time.monotonic_ns() - begin
        cpu: dict[str, float] = collections.defaultdict(float)
        pss: dict[str, list[int]] = collections.defaultdict(list)
        for pid, name in names.items():
            cpu[name] += (cpu_ns([pid]) - before[pid]) / elapsed * 100
            pss[name].append(pss_bytes(pid))
        after = threads_of(names)
    spent = {name: (ns - threads.get(name, 0)) / elapsed * 100 for name, ns in after.items()}
    return {name: Usage(cpu[name], pss[name]) for name in pss}, spent


def threads_of(names: dict[int, str]) -> dict[str, int]:
    """CPU time of the collector's threads so far, ns, by the threads' names in the kernel."""
    found: dict[str, int] = collections.defaultdict(int)
    for pid in [pid for pid, name in names.items() if name == "probing.daemon.collector"]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            found[f"{name} {task.name}"] += int((task / "schedstat").read_text().split()[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", choices=SITUATIONS)
    options = parser.parse_args()
    for situation in [options.only] if options.only else SITUATIONS:
        found, threads = measure(situation, options.seconds)
        rows = [
            {
                "process": name,
                "count": len(usage.pss),
                "CPU, % of a core": f"{usage.cpu:.2f}",
                "PSS each, MB": ", ".join(f"{m / 1e6:.0f}" for m in usage.pss),
            }
            for name, usage in sorted(found.items())
        ]
        rows.append(
            {
                "process": "all",
                "count": sum(len(u.pss) for u in found.values()),
                "CPU, % of a core": f"{sum(u.cpu for u in found.values()):.2f}",
                "PSS each, MB": f"{sum(sum(u.pss) for u in found.values()) / 1e6:.0f} in sum",
            }
        )
        print(f"\n{situation}:\n{table(rows)}")
        busy = sorted(threads.items(), key=lambda item: -item[1])[:8]
        print("collector by thread, % of a core:", ", ".join(f"{name} {share:.2f}" for name, share in busy if share))


if __name__ == "__main__":
    main()
