"""A DDP job that writes down when each of its steps begins: ``accumulation.py LIST`` with MODE in the environment.

``plain``: a loss is reduced every tenth step. ``no_sync``: three micro-steps a step, two of which reduce nothing.
``sync``: three micro-steps that all reduce their gradients, and a norm at the end. ``reduced``: the same without a
norm. OPTIMIZER is sgd, or fused or foreach for AdamW. It says ``ready``, then makes as many steps as a line of stdin
says (``steps N``), and answers ``done``. A step takes PACE seconds at least. ``training.step`` counts them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from typing import TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MODE = os.environ["MODE"]
PACE = float(os.environ.get("PACE", "0"))
MICRO_STEPS = 1 if MODE == "plain" else 3


def made_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    kind = os.environ.get("OPTIMIZER", "sgd")
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.001)
    return torch.optim.AdamW(model.parameters(), lr=0.001, fused=kind == "fused", foreach=kind == "foreach")


class Training:
    def __init__(self, journal: TextIO) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(40 + n, 41 + n) for n in range(4)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.005)
        self.optimizer = made_optimizer(self.model)
        self.journal = journal
        self.step = 0

    def make_step(self) -> None:
        self.journal.write(json.dumps({"step": self.step, "before_ns": time.monotonic_ns()}) + "\n")
        self.optimizer.zero_grad()
        for micro in range(MICRO_STEPS):
            silent = MODE == "no_sync" and micro < MICRO_STEPS - 1
            with self.model.no_sync() if silent else nullcontext():
                loss = self.model(torch.ones(8, 40)).square().mean()
                loss.backward()
        if MODE == "sync" or (MODE == "plain" and self.step % 10 == 0):
            dist.all_reduce(loss.detach())
        self.optimizer.step()
        time.sleep(PACE)
        self.step += 1


def main() -> None:
    dist.init_process_group("gloo")
    with open(sys.argv[1], "w") as journal:
        training = Training(journal)
        print("ready", flush=True)
        while words := os.read(0, 100).decode().split():
            for _ in range(int(words[1])):
                training.make_step()
            journal.flush()
            print("done", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
