"""A 2-rank DDP job. It writes the monotonic time (ns, int64) of the end of each step of rank 0 to the file FILE:
``timed_job.py FILE [WIDTH [PAUSE_S]]``.
"""

from __future__ import annotations

import sys
import time
from array import array

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    points = torch.randn(32, width)
    with open(sys.argv[1], "wb", buffering=0) as out:
        while True:
            optimizer.zero_grad()
            model(points).square().mean().backward()
            optimizer.step()
            time.sleep(pause)
            if dist.get_rank() == 0:
                out.write(array("q", [time.monotonic_ns()]).tobytes())


if __name__ == "__main__":
    main()
