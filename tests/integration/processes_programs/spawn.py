"""Two ranks by torch.multiprocessing.spawn that learn who they are only from their arguments. Usage: spawn.py PORT."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        print("ready", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]),), nprocs=2)
