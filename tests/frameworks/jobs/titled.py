"""DistributedDataParallel with a title that hides what torchrun set: ``titled.py FOLDER``."""

import os
import sys
from pathlib import Path

import setproctitle
import torch
import torch.distributed as dist
from ddp import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    setproctitle.setproctitle(f"pretraining of a model with a long name, worker {os.getpid()}" + " " * 200)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
