"""A 2 x 2 grid of groups, as tensor and data parallel trainings have it: ``grid.py LIST`` on four ranks.

Rows [0,1] and [2,3] reduce small tensors many times a step, columns [0,2] and [1,3] a large one at its end, and the
world a loss. With NAMED=1 the groups have the names that Megatron gives them. It says ``ready``, then makes as many
steps as a line of stdin says (``steps N``), and answers ``done``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

ROWS = ([0, 1], [2, 3])
COLUMNS = ([0, 2], [1, 3])
NAMED = os.environ.get("NAMED") == "1"


def groups(sets: tuple[list[int], ...], name: str) -> Any:
    """The group of ``sets`` that this rank is in: every rank makes all of them."""
    made = [dist.new_group(ranks, group_desc=name if NAMED else None) for ranks in sets]
    return next(group for group, ranks in zip(made, sets, strict=True) if dist.get_rank() in ranks)


def main() -> None:
    dist.init_process_group("gloo")
    row, column = groups(ROWS, "TENSOR_MODEL_PARALLEL_GROUP"), groups(COLUMNS, "DATA_PARALLEL_GROUP")
    with open(sys.argv[1], "w") as journal:
        print("ready", flush=True)
        step = 0
        while words := os.read(0, 100).decode().split():
            for _ in range(int(words[1])):
                journal.write(json.dumps({"step": step, "before_ns": time.monotonic_ns()}) + "\n")
                for layer in range(8):
                    dist.all_reduce(torch.ones(64 + layer // 4), group=row)
                dist.all_reduce(torch.ones(20000), group=column)
                dist.all_reduce(torch.ones(1))
                step += 1
            journal.flush()
            print("done", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
