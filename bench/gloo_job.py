"""A process that makes only gloo collectives, as requested by lines ``COUNT BYTES`` on stdin.

For each line it makes COUNT all_reduces of one element in a group of itself, and reads BYTES of memory before each.
Then it prints the median and the mean time of a collective, ns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        count, size = map(int, line.split())
        memory = torch.ones(max(size // 4, 1))
        spans = []
        for _ in range(count):
            memory.add_(1.0)
            begin = time.perf_counter_ns()
            dist.all_reduce(tensor)
            spans.append(time.perf_counter_ns() - begin)
        print(statistics.median(spans), statistics.fmean(spans), flush=True)


if __name__ == "__main__":
    main()
