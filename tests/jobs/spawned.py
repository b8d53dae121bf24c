"""Three ranks by mp.spawn that know who they are only from their arguments: ``spawned.py PORT FILE``.

Each prints ``RANK PID``. Rank 1 joins the first collective when FILE exists; then all go on for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 3


def run(rank: int, port: int, late: str) -> None:
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    # One write, whole: the ranks share a pipe.
    os.write(1, f"{rank} {os.getpid()}\n".encode())
    while rank == 1 and not Path(late).exists():
        time.sleep(0.05)
    while True:
        dist.all_reduce(torch.ones(7))
        time.sleep(0.2)


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]), sys.argv[2]), nprocs=RANKS)
