"""DistributedDataParallel under torchrun: ``ddp.py FOLDER``."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import STEP_S, count_when_asked, download_shard
from torch.nn.parallel import DistributedDataParallel


def train(folder: Path) -> None:
    rank = dist.get_rank()
    count_when_asked(folder, rank)
    model = DistributedDataParallel(torch.nn.Linear(23, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        time.sleep(STEP_S)
        download_shard(folder, rank)
        optimizer.zero_grad()
        model(torch.ones(5, 23)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
