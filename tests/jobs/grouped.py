"""A rank that a launcher starts: all_reduce for ever, until the file ``DIRECTORY/hang-WORKER`` appears."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def wait_for_nobody():
    time.sleep(3600)


def main():
    hang = Path(sys.argv[1]) / f"hang-{os.environ['PROBING_WORKER']}"
    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(101))
        time.sleep(0.02)
        if hang.exists():
            hang.unlink()
            wait_for_nobody()


main()
