"""Jobs that stop advancing, each for another reason: ``hangs.py CASE FOLDER``; see ranks.py.

A single rank at fault is rank 1, or rank 0 where the fault is typical of that rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import filelock
import torch
import torch.distributed as dist
from ranks import Job, main
from torch.utils.file_baton import FileBaton

FOREVER_S = 1_000_000
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(900)
"""


def rank0_broadcasts(job: Job) -> None:
    """Rank 0 alone validates, and the validation has a collective."""
    job.train()
    if job.rank == 0:
        validate(job)
    job.go_on()


def validate(job: Job) -> None:
    job.begin()
    dist.broadcast(torch.ones(7), 0)


def batch_less(job: Job) -> None:
    """Rank 1 has one batch less than the others and ends the epoch before them."""
    job.train()
    for _ in range(9 if job.rank == 1 else 10):
        job.step()
    if job.rank == 1:
        job.begin()
    dist.barrier()


def time_loop(job: Job) -> None:
    """Each rank trains until its own clock says stop; that of rank 1 says so first."""
    job.train()
    end = time.monotonic() + (0.5 if job.rank == 1 else FOREVER_S)
    while time.monotonic() < end:
        job.step()
    job.begin()
    dist.all_gather([torch.empty(3) for _ in range(job.size)], torch.ones(3))


def swallowed(job: Job) -> None:
    """Rank 1 goes on with the next batch after an exception between two collectives of a step."""
    job.train()
    for batch in range(FOREVER_S):
        dist.all_reduce(torch.ones(101))
        time.sleep(0.02)
        try:
            check_loss(job, batch)
        except ValueError:
            continue
        dist.all_gather([torch.empty(1) for _ in range(job.size)], torch.ones(1))


def check_loss(job: Job, batch: int) -> None:
    if job.rank == 1 and batch == 11:
        job.begin()
        raise ValueError("the loss is not finite")


def stopped(job: Job) -> None:
    """Somebody stops rank 1."""
    job.train()
    if job.rank == 1:
        job.begin()
        os.kill(os.getpid(), signal.SIGSTOP)
    job.go_on()


def gil(job: Job) -> None:
    """A C extension of rank 1 never gives the GIL back."""
    job.train()
    if job.rank == 1:
        job.begin()
        tokenize()
    job.go_on()


def tokenize() -> None:
    ctypes.PyDLL(None).pause()


def lock(job: Job) -> None:
    """Rank 1 wants a lock that its thread for metrics holds."""
    guard = threading.Lock()
    job.train()
    if job.rank == 1:
        threading.Thread(target=flush_metrics, args=(guard,), name="metrics", daemon=True).start()
        while not guard.locked():
            time.sleep(0.001)
        job.begin()
        record_metrics(guard)
    job.go_on()


def flush_metrics(guard: threading.Lock) -> None:
    with guard:
        time.sleep(FOREVER_S)


def record_metrics(guard: threading.Lock) -> None:
    with guard:
        pass


STATISTICS = threading.Lock()


def signal_lock(job: Job) -> None:
    """A signal arrives on rank 1 while it holds a lock, and its handler wants the same one."""
    job.train()
    if job.rank == 1:
        signal.signal(signal.SIGUSR1, dump_statistics)
        job.begin()
        count_tokens()
    job.go_on()


def count_tokens() -> None:
    with STATISTICS:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0)


def dump_statistics(number: int, frame: FrameType | None) -> None:
    with STATISTICS:
        pass


def own_lock(job: Job) -> None:
    """Rank 1 takes a lock twice, and has no other thread."""
    train_then(job, lambda _: merge_statistics())


def merge_statistics() -> None:
    with STATISTICS:
        read_statistics()


def read_statistics() -> None:
    with STATISTICS:
        pass


def regex(job: Job) -> None:
    """Rank 1 matches a text against a pattern that backtracks for ever."""
    train_then(job, lambda _: parse_document())


def parse_document() -> None:
    re.match(r"(\w+\s?)+$", "a" * 60 + "!")


def file_lock(job: Job) -> None:
    """A process that is left of an earlier job holds the lock of the cache that rank 1 wants."""
    train_then(job, prepare_dataset)


def polled_lock(job: Job) -> None:
    """The same by the package filelock, which polls."""
    train_then(job, download_dataset)


def train_then(job: Job, take: Callable[[Path], None]) -> None:
    path = left_of_an_earlier_job(job) if job.rank == 1 else job.folder
    train_at(job, partial(take, path))


def train_at(job: Job, fault: Callable[[], object]) -> None:
    job.train()
    if job.rank == 1:
        job.begin()
        fault()
    job.go_on()


def left_of_an_earlier_job(job: Job) -> Path:
    """Returns a file whose lock another process holds from now on."""
    path = job.folder / "cache.lock"
    path.touch()
    holder = subprocess.Popen((sys.executable, "-c", HOLDER, str(path)), stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    return path


def prepare_dataset(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def download_dataset(path: Path) -> None:
    with filelock.FileLock(path):
        pass


def held_lock(job: Job) -> None:
    """Rank 0 keeps the lock of a file and goes on to a collective; the others want the lock first, as in
    InferenceX#1360."""
    path = job.folder / "tuned.csv.lock"
    path.touch()
    job.train()
    with path.open() as file:
        if job.rank == 0:
            job.begin()
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if job.rank != 0:
            read_tuned(path)
        dist.barrier()


def read_tuned(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def baton(job: Job) -> None:
    """Rank 0 never takes away the file that says that it builds an extension; rank 1 polls for its end."""
    path = job.folder / "lock"
    path.touch()
    train_at(job, partial(load_extension, path))


def load_extension(path: Path) -> None:
    FileBaton(str(path)).wait()


def converts(job: Job) -> None:
    """Rank 0 alone converts its checkpoint, for longer than the others can wait, as in torchtune#2059."""
    job.train()
    if job.rank == 0:
        job.begin()
        convert_checkpoint(job.folder / "converted.pt")
    job.go_on()


def convert_checkpoint(path: Path) -> None:
    while True:
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        time.sleep(0.05)


def context_lock(job: Job) -> None:
    """A thread of rank 1 loads a module under the lock of the context, which its copy wants, as in torchcomms#2334."""
    driver = ctypes.CDLL(str(job.folder / "driver.so"))

    def load_and_copy() -> None:
        threading.Thread(target=load_module, args=(driver,), name="loader", daemon=True).start()
        while not driver.driver_is_locked():
            time.sleep(0.001)
        copy_batch(driver)

    train_at(job, load_and_copy)


def load_module(driver: ctypes.CDLL) -> None:
    driver.cuLibraryLoadData()


def copy_batch(driver: ctypes.CDLL) -> None:
    driver.cudaMemcpyAsync()


def stdin(job: Job) -> None:
    """Somebody left a breakpoint in the code of rank 1."""
    job.train()
    if job.rank == 1:
        inspect_batch(job)
    job.go_on()


def inspect_batch(job: Job) -> None:
    job.begin()
    breakpoint()


def checkpoint(job: Job) -> None:
    """Rank 0 writes a checkpoint to FOLDER/mount, whose file system does not answer."""
    job.train()
    if job.rank == 0:
        save_checkpoint(job)
    job.go_on()


def save_checkpoint(job: Job) -> None:
    job.begin()
    torch.save({"weights": torch.ones(20_000)}, job.folder / "mount" / "step-100.pt")


def sizes(job: Job) -> None:
    """The tensor of rank 1 is longer than those of the others."""
    job.train()
    if job.rank == 1:
        job.begin()
    dist.all_reduce(torch.ones(2027 if job.rank == 1 else 1013))
    job.go_on()


def dtypes(job: Job) -> None:
    """The tensor of rank 1 has another element type."""
    job.train()
    if job.rank == 1:
        job.begin()
    dist.all_reduce(torch.ones(1013, dtype=torch.float64 if job.rank == 1 else torch.float32))
    job.go_on()


def cross_group(job: Job) -> None:
    """Ranks 0 to 2 wait for each other in a ring of three groups; rank 3 waits for all of them."""
    pairs = [dist.new_group([rank, (rank + 1) % 3], group_desc=f"pair{rank}") for rank in range(3)]
    for pair in (0, 1, 2):
        if job.rank in (pair, (pair + 1) % 3):
            dist.all_reduce(torch.ones(5), group=pairs[pair])
    job.train()
    if job.rank < 3:
        job.begin()
        dist.all_reduce(torch.ones(5), group=pairs[job.rank])
        dist.all_reduce(torch.ones(5), group=pairs[(job.rank + 2) % 3])
    job.go_on()


def drifts(job: Job) -> None:
    """Rank 1 has no tokens in one step and skips a collective of dp; the ranks wait for all of dp some steps later."""
    dp = dist.new_group(group_desc="dp")
    job.train()
    for first in range(0, FOREVER_S, 8):
        works = []
        for step in range(first, first + 8):
            if job.rank == 1 and step == 99:
                job.begin()
            else:
                works.append(dist.all_reduce(torch.ones(3), group=dp, async_op=True))
            time.sleep(0.02)
            dist.all_reduce(torch.ones(101))
        for work in works:
            work.wait()
        dist.all_reduce(torch.ones(101))


def unmatched(job: Job) -> None:
    """Rank 0 sends what rank 1 never receives."""
    job.train()
    if job.rank == 0:
        job.begin()
        dist.send(torch.ones(7), 1)
    job.go_on()


def groups(job: Job) -> None:
    """Eight ranks in pairs and in two groups of four; rank 5 stays in its own code."""
    rows = [dist.new_group([row, row + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for row in (0, 2, 4, 6)]
    columns = [dist.new_group(range(column, 8, 2), group_desc="DATA_PARALLEL_GROUP") for column in (0, 1)]

    def work() -> None:
        time.sleep(0.02)
        dist.all_reduce(torch.ones(64), group=rows[job.rank // 2])
        dist.all_reduce(torch.ones(1013), group=columns[job.rank % 2])

    job.train(work)
    if job.rank == 5:
        place_experts(job)
    job.go_on(work)


def place_experts(job: Job) -> None:
    job.begin()
    time.sleep(FOREVER_S)


def fsdp(job: Job) -> None:
    """FSDP2 over two ranks; rank 1 stays in its own code."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import Linear, Sequential

    mesh = init_device_mesh("cpu", (job.size,))
    model = Sequential(Linear(16, 16), Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        time.sleep(0.02)
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    job.train(work)
    if job.rank == 1:
        place_experts(job)
    job.go_on(work)


def ddp(job: Job) -> None:
    """DistributedDataParallel over two ranks; rank 1 stays in its own code."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))

    def work() -> None:
        time.sleep(0.02)
        model(torch.ones(4, 16)).sum().backward()

    job.train(work)
    if job.rank == 1:
        place_experts(job)
    job.go_on(work)


def dead_at_store(job: Job) -> None:
    """Rank 1 is killed while the others wait for its key in the store, so that none of them gets an error."""
    store = dist.distributed_c10d._get_default_store()
    job.train()
    if job.rank == 1:
        job.begin()
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["checkpoint of rank 1"])


def absent(job: Job) -> None:
    """Rank 1 prepares its data for ever and never joins the others."""
    if job.rank == 1:
        prepare_data(job)
    job.join()
    job.go_on()


def prepare_data(job: Job) -> None:
    while not job.due():
        time.sleep(0.01)
    job.begin()
    time.sleep(FOREVER_S)


CASES = {
    case.__name__: case
    for case in (
        rank0_broadcasts,
        batch_less,
        time_loop,
        swallowed,
        stopped,
        gil,
        lock,
        file_lock,
        polled_lock,
        held_lock,
        baton,
        converts,
        context_lock,
        stdin,
        checkpoint,
        sizes,
        dtypes,
        cross_group,
        drifts,
        signal_lock,
        own_lock,
        regex,
        unmatched,
        groups,
        fsdp,
        ddp,
        dead_at_store,
        absent,
    )
}

if __name__ == "__main__":
    main(CASES, "absent")
