"""Ranks of gloo that all_reduce together until the last one stops: ``stops.py STEPS WHAT [FILE]`` under torchrun.

Each rank makes STEPS all_reduces and waits until FILE exists, if one is named. Then the last rank sleeps (``sleep``),
is killed by SIGKILL (``kill``), ends with exit code 3 (``exit``), or takes more memory than the cgroup in the directory
WHAT allows; the others wait for it in the next all_reduce. Each rank prints ``waits`` before that one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    steps, what = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    for _ in range(steps):
        dist.all_reduce(torch.ones(1013))
    while sys.argv[3:] and not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    print("waits", flush=True)
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "sleep":
            time.sleep(1_000_000)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
        Path(what, "cgroup.procs").write_text(str(os.getpid()))
        _ = [bytearray(1 << 20) for _ in range(1 << 12)]
    dist.all_reduce(torch.ones(1013))


if __name__ == "__main__":
    main()
