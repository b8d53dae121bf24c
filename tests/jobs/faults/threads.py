"""Jobs that train in another thread than the main one, which only waits: ``threads.py CASE FOLDER``; see ranks.py."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from ranks import Job, main

FOREVER_S = 1_000_000


def ray_worker(job: Job) -> None:
    """As Ray Train: the main thread waits for tasks. Rank 1 waits between retries of a download."""
    threading.Thread(target=train, args=(job, download_shard), name="TrainingThread(train)", daemon=True).start()
    tasks: queue.Queue[object] = queue.Queue()
    tasks.get()


def executor(job: Job) -> None:
    """The main thread waits for a future. Rank 1 wants a lock that another thread holds."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train, job, record_metrics).result()


def embedded(job: Job) -> None:
    """The main thread belongs to a program in C. Somebody left a breakpoint in the code of rank 1."""
    threading.Thread(target=train, args=(job, inspect_batch), daemon=True).start()
    ctypes.CDLL(None).pause()


def train(job: Job, fault: Callable[[Job], None]) -> None:
    job.train()
    if job.rank == 1:
        fault(job)
    job.go_on()


def download_shard(job: Job) -> None:
    job.begin()
    time.sleep(FOREVER_S)


def record_metrics(job: Job) -> None:
    guard = threading.Lock()
    threading.Thread(target=flush_metrics, args=(guard,), name="metrics", daemon=True).start()
    while not guard.locked():
        time.sleep(0.001)
    job.begin()
    with guard:
        pass


def flush_metrics(guard: threading.Lock) -> None:
    with guard:
        time.sleep(FOREVER_S)


def inspect_batch(job: Job) -> None:
    job.begin()
    sys.stdin.readline()


if __name__ == "__main__":
    assert dist.is_available()
    main({case.__name__: case for case in (ray_worker, executor, embedded)})
