"""Healthy jobs, some of which look as if they hung: ``healthy.py CASE FOLDER``; see ranks.py.

Once FOLDER/go exists they end as trainings do. The variable LONG is the length of their long parts in seconds: more
than the time after which a job counts as stalled.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from ranks import STEP_S, Job, main
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

LONG_S = float(os.environ.get("LONG", "5"))
BLOCK = 1 << 20
BUSY_S = 0.003
BUSY = 50
MANY = 1_000_000
WIDTHS = count(4)


def compute(seconds: float) -> None:
    """Computes for ``seconds`` with a tenth of a CPU: a loop that only sleeps looks like a hang."""
    weights = torch.ones(32, 32)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        forward(weights)
        backward(weights)


def forward(weights: Tensor) -> None:
    multiply(weights)
    time.sleep(0.02)


def backward(weights: Tensor) -> None:
    multiply(weights.T)
    time.sleep(0.03)


def multiply(weights: Tensor) -> None:
    end = time.thread_time() + BUSY_S
    while time.thread_time() < end:
        weights @ weights


def long_steps(job: Job) -> None:
    job.train(partial(compute, LONG_S + 0.3 * job.rank))


def evaluation(job: Job) -> None:
    """All ranks evaluate on their own, for different lengths of time."""
    while not any(job.step() for _ in range(20)):
        evaluate(LONG_S * (6 + job.rank))
        dist.all_reduce(torch.ones(3))


def evaluate(seconds: float) -> None:
    compute(seconds)


def checkpoint(job: Job) -> None:
    """Rank 0 writes a checkpoint, and the others wait for it."""
    while not any(job.step() for _ in range(20)):
        if job.rank == 0:
            save_checkpoint(job, LONG_S)
        dist.barrier()


def save_checkpoint(job: Job, seconds: float) -> None:
    end = time.monotonic() + seconds
    with (job.folder / "checkpoint.pt").open("wb") as file:
        while time.monotonic() < end:
            file.write(bytes(BLOCK))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.1)


def compiled(job: Job) -> None:
    """The first step compiles, on rank 1 after rank 0."""
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)))

    def work() -> None:
        model(torch.ones(8, 16)).sum().backward()
        time.sleep(STEP_S)

    job.train(work)


def compiles_alone(job: Job) -> None:
    """Rank 1 compiles in the middle of the training, since its cache is cold, as in nanochat#722; the others wait."""
    while not any(job.step() for _ in range(20)):
        if job.rank == 1:
            compile_for(LONG_S)
        dist.barrier()


def compile_for(seconds: float) -> None:
    """Compiles models, each for the first time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        width = next(WIDTHS)
        torch.compile(torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.GELU()))(torch.ones(8, 16))


def collects_in_turn(job: Job) -> None:
    """The ranks collect garbage among many objects, each in other steps than the others, as in marin#9205."""
    kept = [[number] for number in range(MANY)]
    for number in count():
        if number % 10 == 3 * job.rank:
            gc.collect()
        if job.step():
            break
    del kept


def workers(job: Job) -> None:
    """Each rank has two data-loader processes, which are a little slow."""
    data = TensorDataset(torch.ones(400, 3))
    while True:
        for _ in DataLoader(data, batch_size=2, num_workers=2):
            if job.step():
                return


def ends(job: Job) -> None:
    """The ranks end one after the other; rank 0 has something left to do."""
    job.train()
    dist.destroy_process_group()
    if job.rank == 0:
        save_checkpoint(job, LONG_S)


def plain(job: Job) -> None:
    job.train()


def rotating(job: Job) -> None:
    """Batches of different lengths: in each step another rank has the long one."""
    step = 0
    while not job.step(partial(time.sleep, 0.12 if step % job.size == job.rank else 0.03)):
        step += 1


def idle_accept(job: Job) -> None:
    """A server: rank 0 waits for connections, and the other ranks for what it broadcasts."""
    server = socket.create_server(("127.0.0.1", 0))
    serve(job, lambda: server.accept()[0].close(), server)


def idle_asyncio(job: Job) -> None:
    """The same with asyncio: the event loop of rank 0 waits for connections."""
    server = socket.create_server(("127.0.0.1", 0))
    serve(job, lambda: asyncio.run(one_connection(server)), server)


async def one_connection(server: socket.socket) -> None:
    came = asyncio.Event()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        came.set()

    async with await asyncio.start_server(connected, sock=server.dup()):
        await came.wait()


def idle_queue(job: Job) -> None:
    """The same with a thread of rank 0 that accepts connections and puts them into a queue."""
    server = socket.create_server(("127.0.0.1", 0))
    requests: queue.Queue[socket.socket] = queue.Queue()

    def accept() -> None:
        while True:
            requests.put(server.accept()[0])

    threading.Thread(target=accept, name="acceptor", daemon=True).start()
    serve(job, lambda: requests.get().close(), server)


def serve(job: Job, next_request: Callable[[], object], server: socket.socket) -> None:
    """Hands out ``BUSY`` requests of its own, then waits for a request: none comes before the job is to end."""
    for _ in range(BUSY):
        time.sleep(STEP_S)
        dist.broadcast(torch.ones(3), src=0)
    if job.rank == 0:
        threading.Thread(target=end, args=(job, server), daemon=True).start()
        next_request()
    dist.broadcast(torch.ones(3), src=0)


def end(job: Job, server: socket.socket) -> None:
    while not job.due():
        time.sleep(STEP_S)
    socket.create_connection(server.getsockname()).close()


def stays(job: Job) -> None:
    """All ranks end but rank 0, which waits for a thread that uploads."""
    for _ in range(BUSY):
        job.step()
    dist.barrier()
    dist.destroy_process_group()
    if job.rank == 0:
        threading.Thread(target=upload, args=(job,), name="uploader").start()


def upload(job: Job) -> None:
    while not job.due():
        time.sleep(STEP_S)


SERVERS = (idle_accept, idle_asyncio, idle_queue)
CASES = {
    case.__name__: case
    for case in (
        long_steps,
        evaluation,
        checkpoint,
        compiled,
        compiles_alone,
        collects_in_turn,
        workers,
        ends,
        plain,
        stays,
        rotating,
        *SERVERS,
    )
}

if __name__ == "__main__":
    main(CASES)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0)
