"""Accelerate: ``accelerated.py FOLDER`` under torchrun; its own launcher takes MPI for several ranks on CPUs."""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from common import STEP_S, count_when_asked, download_shard


def train(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    count_when_asked(folder, rank)
    model = torch.nn.Linear(23, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    while True:
        time.sleep(STEP_S)
        download_shard(folder, rank)
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(5, 23)).sum())
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]))
