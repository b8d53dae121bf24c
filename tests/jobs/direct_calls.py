"""A gloo job that makes collective calls itself and writes down each of them, before it makes it, as a line of JSON.

``direct_calls.py LIST`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It says ``ready`` on stdout and then
takes commands from stdin, the same on every rank: ``rounds N``; ``stream``, rounds until the next line comes;
``stall``, one all_reduce that only rank 0 makes; ``answer``, the same by rank 1; ``quit``. A round is 23 all_reduce,
7 broadcast and 5 barrier on each of two groups, each group in a thread of its own, every other call with async_op.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
STALLS = ("stall", "answer")
CALLS = [op for i in range(23) for op in (["all_reduce"] + ["broadcast"] * (i < 7) + ["barrier"] * (i < 5))]


class Journal:
    """The list of this rank: a line holds what the row of that call has to say."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, **line: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class Group:
    """One process group, called from one thread at a time."""

    def __init__(self, group: Any, journal: Journal) -> None:
        self.group = group
        self.journal = journal
        self.rounds = 0

    def call(self, number: int, op: str) -> Any:
        is_async = number % 2 == 1
        tensor = torch.ones(1 + 7 * number, dtype=DTYPES[number % len(DTYPES)])
        data = op != "barrier"
        self.journal.write(
            rank=dist.get_rank(),
            tid=threading.get_native_id(),
            comm=self.group.group_name,
            seq=self.group._get_sequence_number_for_group() + 1,
            op=op,
            bytes=tensor.numel() * tensor.element_size() if data else 0,
            dtype=str(tensor.dtype).removeprefix("torch.") if data else None,
            async_op=is_async,
            before_ns=time.monotonic_ns(),
        )
        if op == "all_reduce":
            return dist.all_reduce(tensor, group=self.group, async_op=is_async)
        if op == "broadcast":
            return dist.broadcast(tensor, number % 2, group=self.group, async_op=is_async)
        return dist.barrier(self.group, async_op=is_async)

    def round(self) -> None:
        self.rounds += 1
        for work in [self.call(number, op) for number, op in enumerate(CALLS)]:
            if work is not None:
                work.wait()

    def stream(self, stop: Callable[[], bool]) -> None:
        """Rounds until rank 0 stops, which the others learn from the store."""
        while True:
            store = dist.distributed_c10d._get_default_store()
            key = f"{self.group.group_name}/{self.rounds}"
            if dist.get_rank() == 0:
                store.set(key, "stop" if stop() else "go")
            if store.get(key) == b"stop":
                return
            self.round()


def on_both(groups: list[Group], do: Callable[[Group], None]) -> None:
    threads = [threading.Thread(target=do, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def input_waits() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def obey(groups: list[Group], words: list[str]) -> None:
    if words[0] == "rounds":
        for _ in range(int(words[1])):
            on_both(groups, Group.round)
    elif words[0] == "stream":
        on_both(groups, lambda group: group.stream(input_waits))
    elif words[0] == STALLS[dist.get_rank()]:
        groups[0].call(1, "all_reduce")


def main() -> None:
    dist.init_process_group("gloo")
    with open(sys.argv[1], "w") as file:
        journal = Journal(file)
        groups = [Group(dist.group.WORLD, journal), Group(dist.new_group([0, 1]), journal)]
        print("ready", flush=True)
        while words := os.read(0, 100).decode().split():
            if words[0] == "quit":
                break
            obey(groups, words)
            print("done", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # A stalled operation would hold up the destruction of its group.
    os._exit(0)
