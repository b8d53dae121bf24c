"""Ranks of torch.multiprocessing.spawn with no variable of a launcher: ``spawned.py FOLDER PORT``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from ddp import train


def run(rank: int, folder: str, port: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    train(Path(folder))


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(sys.argv[1], sys.argv[2]), nprocs=2)
