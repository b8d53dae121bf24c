"""torch.distributed.rpc under torchrun, rank 0 asks rank 1: ``rpc_master.py FOLDER``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from common import STEP_S, count_when_asked, download_shard

FOLDER = Path(sys.argv[1])


def forward(batch: torch.Tensor) -> torch.Tensor:
    """What rank 0 asks rank 1 for: it runs in a thread of torch's."""
    download_shard(FOLDER, 1)
    return batch.sum()


def train(rank: int) -> None:
    while rank == 0:
        time.sleep(STEP_S)
        rpc.rpc_sync("worker1", forward, args=(torch.ones(23, 7),), timeout=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    count_when_asked(FOLDER, rank)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    train(rank)
    rpc.shutdown()
