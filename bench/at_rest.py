"""CPU and memory of all of the daemon's processes beside 8 ranks that wait."""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from pathlib import Path

from running import BenchDaemon, cpu_ns, job, pss_bytes, tree
from statistics_of_blocks import table

WAITING = """
import signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open(sys.argv[1] + str(dist.get_rank()), "w").close()
signal.pause()
"""


def module_of(pid: int) -> str:
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return argv[argv.index(b"-m") + 1].decode() if b"-m" in argv else "supervisor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="probingd-bench-")
    daemon = BenchDaemon()
    with job("-c", WAITING, f"{folder}/rank", ranks=options.ranks):
        while len(list(Path(folder).glob("rank*"))) < options.ranks:
            time.sleep(0.2)
        daemon.start()
        daemon.ctl("query", "SELECT count(*) FROM comm.ops")
        time.sleep(5)
        assert daemon.process is not None
        pids = tree(daemon.process.pid)
        before = {pid: cpu_ns([pid]) for pid in pids}
        begin = time.monotonic_ns()
        time.sleep(options.seconds)
        elapsed = time.monotonic_ns() - begin
        cpu: dict[str, float] = collections.defaultdict(float)
        memory: dict[str, list[int]] = collections.defaultdict(list)
        for pid in pids:
            name = module_of(pid)
            cpu[name] += (cpu_ns([pid]) - before[pid]) / elapsed * 100
            memory[name].append(pss_bytes(pid))
        daemon.close()
    rows = [
        {"process": name, "count": len(memory[name]), "CPU, % of a core": f"{cpu[name]:.2f}",
         "PSS each, MB": ", ".join(f"{m / 1e6:.0f}" for m in memory[name])}
        for name in sorted(memory)
    ]  # fmt: skip
    rows.append({"process": "all", "count": len(pids), "CPU, % of a core": f"{sum(cpu.values()):.2f}",
                 "PSS each, MB": f"{sum(map(sum, memory.values())) / 1e6:.0f} in sum"})  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
