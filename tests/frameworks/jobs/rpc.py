"""torch RPC under torchrun: ``rpc.py FOLDER``. Rank 0 asks rank 1, which serves in threads of C++."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from common import STEP_S, download_shard

RANK = int(os.environ["RANK"])


def serve(folder: str) -> int:
    download_shard(Path(folder), RANK)
    return RANK


if __name__ == "__main__":
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=2)
    while RANK == 0:
        time.sleep(STEP_S)
        rpc.rpc_sync("worker1", serve, args=(sys.argv[1],), timeout=0)
    rpc.shutdown()
