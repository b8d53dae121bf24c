"""Jobs that become slow, by rank 1 or as a whole: ``slow.py CASE FOLDER``; see ranks.py.

A step computes for 20 ms of the thread's CPU clock, so that it costs the same on every machine.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from ranks import STEP_S, Job, main
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

STEP_CPU_S = 0.02
IDLE_S = 0.03
MANY = 1_000_000


def forward(cpu_s: float = STEP_CPU_S) -> None:
    weights = torch.ones(64, 64)
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        weights @ weights
    time.sleep(IDLE_S)


def augment(seconds: float) -> None:
    time.sleep(seconds)


def augmented(seconds: float) -> None:
    augment(seconds)
    forward()


def sleeps(job: Job) -> None:
    """Rank 1 has slow code in each step."""
    job.train(forward)
    if job.rank == 1:
        job.begin()
    job.go_on(partial(augmented, 0.06) if job.rank == 1 else forward)


def beside_a_hog(job: Job) -> None:
    """Rank 1 shares core 1 with the processes of hog.py; the other rank runs on core 0."""
    os.sched_setaffinity(0, {1 if job.rank == 1 else 0})
    job.train(forward)
    job.go_on(forward)


class Images(Dataset[Tensor]):
    """Images that take 0.2 s of a CPU each."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return decode()


def decode() -> Tensor:
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    return torch.ones(11)


def shared_cpu(job: Job) -> None:
    """Rank 1 and its four data-loader workers may use core 1 alone, as after an import that calls sched_setaffinity."""
    job.train(forward)
    if job.rank == 1:
        os.sched_setaffinity(0, {1})
        batches = iter(DataLoader(Images(), batch_size=None, num_workers=4))
        job.begin()
        job.go_on(partial(loaded, batches))
    job.go_on(idle)


def loaded(batches: Iterator[Tensor]) -> None:
    next(batches)
    forward()


def idle() -> None:
    time.sleep(IDLE_S)


def recompiles(job: Job) -> None:
    """Rank 1 compiles in each step, as without a cache; the other one compiled once."""
    model = torch.compile(normalized, backend="eager")
    model(torch.ones(8))
    job.train(forward)
    if job.rank == 1:
        job.begin()
        job.go_on(partial(forgetful, model))
    job.go_on(partial(compiled, model))


def normalized(batch: Tensor) -> Tensor:
    for _ in range(30):
        batch = torch.nn.functional.layer_norm(batch + 1, batch.shape)
    return batch


def compiled(model: Callable[[Tensor], Tensor]) -> None:
    model(torch.ones(8))
    forward()


def forgetful(model: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    compiled(model)


SHARD_BYTES = 64 << 20


def cold_pages(job: Job) -> None:
    """Both ranks read a shard in each step; only on rank 1 the kernel has to read it from the disk."""
    shard = job.folder / f"shard-{job.rank}"
    with shard.open("wb") as file:
        file.write(os.urandom(SHARD_BYTES))
        os.fsync(file.fileno())
    read_shard(shard)
    job.train(forward)
    if job.rank == 1:
        job.begin()
        job.go_on(partial(evicted, shard))
    job.go_on(partial(read_shard, shard))


def evicted(shard: Path) -> None:
    with shard.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_shard(shard)


def read_shard(shard: Path) -> None:
    with shard.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    time.sleep(IDLE_S)


def quota(job: Job) -> None:
    """Its cgroup gives rank 1 less CPU than it needs."""
    job.train(forward)
    if job.rank == 1:
        job.enter_group()
        job.begin()
    job.go_on(forward)


def bigger_batch(job: Job) -> None:
    """Rank 1 computes more than the others in each step, by the same code."""
    job.train(forward)
    if job.rank == 1:
        job.begin()
    job.go_on(partial(forward, 4 * STEP_CPU_S if job.rank == 1 else STEP_CPU_S))


def collects(job: Job) -> None:
    """Rank 1 collects garbage among many objects in each step, as in marin#9205."""
    job.train(forward)
    kept: list[list[int]] = []
    if job.rank == 1:
        kept += [[number] for number in range(MANY)]
        job.begin()
    job.go_on(collected if job.rank == 1 else forward)
    del kept


def collected() -> None:
    tidy_up()
    forward()


def tidy_up() -> None:
    gc.collect()


def all_slower(job: Job) -> None:
    """All ranks read from a storage that has become slow."""
    job.train()
    job.begin()
    job.go_on(read_batch)


def read_batch() -> None:
    time.sleep(0.12)
    time.sleep(STEP_S)


_OF_ONE_RANK = (sleeps, beside_a_hog, shared_cpu, recompiles, cold_pages, quota, bigger_batch, collects)
CASES = {case.__name__: case for case in (*_OF_ONE_RANK, all_slower)}

if __name__ == "__main__":
    main(CASES)
