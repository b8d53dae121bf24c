"""DeepSpeed with ZeRO: ``deepspeed_zero.py FOLDER`` under its launcher."""

import argparse
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import STEP_S, count_when_asked, download_shard

CONFIG = {
    "train_micro_batch_size_per_gpu": 5,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def train(folder: Path) -> None:
    model = torch.nn.Linear(23, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    count_when_asked(folder, rank)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    while True:
        time.sleep(STEP_S)
        download_shard(folder, rank)
        engine.backward(engine(torch.ones(5, 23)).sum())
        engine.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("folder", type=Path)
    torch.set_num_threads(1)
    train(parser.parse_args().folder)
