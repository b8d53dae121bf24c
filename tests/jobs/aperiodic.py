"""A job without steps: operations, sizes and their order are drawn by lot, the same on all ranks.

``aperiodic.py LIST``; it says ``ready``, then makes as many operations as a line of stdin says (``steps N``).
"""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist

SIZES = (1, 8, 100, 1000)


def make(chance: random.Random) -> None:
    size = chance.choice(SIZES) if chance.random() < 0.7 else chance.randrange(1, 5000)
    op = chance.choice(("all_reduce", "broadcast", "barrier"))
    if op == "all_reduce":
        dist.all_reduce(torch.ones(size))
    elif op == "broadcast":
        dist.broadcast(torch.ones(size), 0)
    else:
        dist.barrier()


def main() -> None:
    open(sys.argv[1], "w").close()
    dist.init_process_group("gloo")
    chance = random.Random(11)
    print("ready", flush=True)
    while words := os.read(0, 100).decode().split():
        for _ in range(int(words[1])):
            make(chance)
        print("done", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
