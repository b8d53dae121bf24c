"""Jobs in which rank 1 ends or takes too much memory: ``deaths.py CASE FOLDER``; see ranks.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import STEP_S, Job, main

MB = 1 << 20
LOGS_S = 900


def killed(job: Job) -> None:
    job.train()
    if job.rank == 1:
        job.begin()
        os.kill(os.getpid(), signal.SIGKILL)
    job.go_on()


def leaves(job: Job) -> None:
    """Rank 1 has no more data and ends as if all were well."""
    job.train()
    if job.rank == 1:
        job.begin()
        dist.destroy_process_group()
        sys.exit(0)
    job.go_on()


def raises(job: Job) -> None:
    job.train()
    if job.rank == 1:
        job.begin()
        parse_batch()
    job.go_on()


def destroys(job: Job) -> None:
    """Rank 1 fails, leaves its group, and then writes its logs for a while: the others die of that before it ends."""
    job.train()
    if job.rank == 1:
        job.begin()
        try:
            parse_batch()
        finally:
            dist.destroy_process_group()
            gc.collect()
            write_logs()
    job.go_on()


def write_logs() -> None:
    time.sleep(LOGS_S)


def parse_batch() -> None:
    raise ZeroDivisionError("a batch of no samples")


def out_of_memory(job: Job) -> None:
    """Rank 1 takes more memory than its cgroup has."""
    job.train()
    if job.rank == 1:
        job.enter_group()
        job.begin()
        _ = [bytearray(MB) for _ in range(1 << 12)]
    job.go_on()


def killed_loading(job: Job) -> None:
    """Rank 1 takes more memory than there is while it loads its weights; rank 0, whose pipe the launcher reads, waits
    for it in the creation of the group, as in sglang#20287."""
    if job.rank == 1:
        job.enter_group()
        load_weights(job)
    job.join()
    job.go_on()


def load_weights(job: Job) -> None:
    while not job.due():
        time.sleep(STEP_S)
    job.begin()
    _ = [bytearray(MB) for _ in range(1 << 12)]


def twice(job: Job) -> None:
    """Rank 1 has twice the memory of the others."""
    job.train()
    cache = []
    if job.rank == 1:
        job.begin()
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        cache.append(torch.ones(own * 5 // 4 // 4))
    job.go_on()


def leak(job: Job) -> None:
    """Rank 1 keeps 1 MB of each step, in a cgroup with a limit."""
    kept: list[bytearray] = []
    if job.rank == 1:
        job.enter_group()
    job.train()
    if job.rank == 1:
        job.begin()
    job.go_on(partial(remember, kept, MB if job.rank == 1 else 0))


def remember(kept: list[bytearray], size: int) -> None:
    kept.append(bytearray(b"x") * size)
    time.sleep(STEP_S)


CASES = {case.__name__: case for case in (killed, killed_loading, leaves, raises, destroys, out_of_memory, twice, leak)}

if __name__ == "__main__":
    main(CASES, "killed_loading")
