"""Engines that start their ranks by multiprocessing, with no rank in any environment: ``engines.py CASE FOLDER``.

The engine hands out steps and holds no rank; the workers know their numbers from its arguments. See ranks.py.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import setproctitle

SIZE = 2
FOREVER_S = 1_000_000


def tensor_parallel(folder: Path) -> None:
    """As vLLM: titles, and workers that poll a ring of steps. Worker 1 waits for blocks of its cache's peer."""
    setproctitle.setproctitle("VLLM::EngineCore")
    serve(folder, "spawn", worker)


def forked(folder: Path) -> None:
    """The engine imports torch itself and forks; nobody has a title. Worker 1 sleeps."""
    import torch

    assert torch.ones(1).item() == 1
    serve(folder, "fork", untitled_worker)


def data_parallel(folder: Path) -> None:
    """An engine that has a group of its own, as with data parallelism. Worker 1 waits for its cache's peer."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    setproctitle.setproctitle("VLLM::EngineCore_DP0")
    serve(folder, "spawn", worker)


def serve(folder: Path, method: str, target: object) -> None:
    ring, context, port = SharedMemory(create=True, size=8), multiprocessing.get_context(method), _free_port()
    for rank in range(SIZE):
        arguments = (folder, rank, port, ring.name)
        context.Process(target=target, args=arguments, daemon=True).start()  # type: ignore[attr-defined]
    for step in range(1, FOREVER_S):
        ring.buf[:8] = step.to_bytes(8, "little")
        time.sleep(0.05)


def worker(folder: Path, rank: int, port: int, ring_name: str) -> None:
    setproctitle.setproctitle(f"VLLM::Worker_TP{rank}")
    _work(folder, rank, port, ring_name, fetch_blocks)


def untitled_worker(folder: Path, rank: int, port: int, ring_name: str) -> None:
    _work(folder, rank, port, ring_name, place_experts)


def fetch_blocks() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(silent.getsockname()).recv(4096)


def place_experts() -> None:
    time.sleep(FOREVER_S)


def _work(folder: Path, rank: int, port: int, ring_name: str, fault: object) -> None:
    import torch
    import torch.distributed as dist
    from ranks import Job

    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    job, ring, seen = Job(folder, rank, SIZE), SharedMemory(ring_name), 0
    while True:
        while int.from_bytes(ring.buf[:8], "little") <= seen:
            os.sched_yield()
            time.sleep(0.0005)
        seen += 1
        if job.step(lambda: None) and rank == 1:
            job.begin()
            fault()  # type: ignore[operator]


def _end_with_the_engine() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    {case.__name__: case for case in (tensor_parallel, forked, data_parallel)}[sys.argv[1]](Path(sys.argv[2]))
