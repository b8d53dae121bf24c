"""Jobs in which rank 1 gets no data: ``loaders.py CASE FOLDER``; see ranks.py.

Only rank 1 has data-loader workers, where a case is about them. It alone decides when the fault is due:
the others wait for it in their next step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import torch
from ranks import STEP_S, Job, main
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

FOREVER_S = 1_000_000


class Shards(Dataset[Tensor]):
    """Shards that come at once until the fault is due."""

    def __init__(self, job: Job, fault: Callable[[Job], object]) -> None:
        self.job, self.fault = job, fault

    def __len__(self) -> int:
        return FOREVER_S

    def __getitem__(self, index: int) -> Tensor:
        return fetch_shard(self.job, self.fault)


def fetch_shard(job: Job, fault: Callable[[Job], object]) -> Tensor:
    if job.rank == 1 and job.due():
        job.begin()
        fault(job)
    return torch.ones(11)


def read_object(job: Job) -> None:
    time.sleep(FOREVER_S)


def kill(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust(job: Job) -> None:
    """Takes more memory than its cgroup has."""
    job.enter_group()
    _ = [bytearray(1 << 20) for _ in range(1 << 12)]


def flood(job: Job) -> Tensor:
    """Returns a tensor in shared memory that /dev/shm has no room for."""
    return torch.ones(4 << 20).share_memory_()


def train(job: Job, batches: Iterator[Any]) -> None:
    def work() -> None:
        next(batches)
        time.sleep(STEP_S)

    job.go_on(work)


def by_loader(job: Job, fault: Callable[[Job], object], workers: int) -> None:
    loader = DataLoader(Shards(job, fault), batch_size=None, num_workers=workers if job.rank == 1 else 0)
    train(job, iter(loader))


def worker_gone(job: Job) -> None:
    """The loader is the job's own: a process that fills a queue. It is killed, and nothing watches it."""
    train(job, own_loader(job) if job.rank == 1 else iter(Shards(job, kill)))


def own_loader(job: Job) -> Iterator[Tensor]:
    queue: Queue[int] = multiprocessing.Queue(2)
    multiprocessing.Process(target=fill, args=(job, queue), name="prefetch", daemon=True).start()
    while True:
        yield torch.full((11,), queue.get())


def fill(job: Job, queue: Queue[int]) -> None:
    for number in range(FOREVER_S):
        fetch_shard(job, kill)
        queue.put(number)


CASES: dict[str, Callable[[Job], object]] = {
    "sleeping": partial(by_loader, fault=read_object, workers=0),
    "worker_stuck": partial(by_loader, fault=read_object, workers=1),
    "worker_gone": worker_gone,
    "worker_killed": partial(by_loader, fault=kill, workers=1),
    "worker_oom": partial(by_loader, fault=exhaust, workers=1),
    "shm_full": partial(by_loader, fault=flood, workers=1),
}

if __name__ == "__main__":
    main(CASES)
