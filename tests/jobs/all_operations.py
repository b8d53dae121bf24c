"""Every operation of torch's gloo backend once, each written down before it is made: see ``direct_calls.py``.

After ``ready`` a line of stdin starts it, and ``done`` says that it has ended.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any, TextIO

import torch
import torch.distributed as dist

warnings.simplefilter("ignore", FutureWarning)
SIZE = 2


class Calls:
    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.group: Any = dist.group.WORLD
        self.rank = dist.get_rank()

    def expect(
        self, op: str, count: int | None, dtype: str | None = "float32", ops: int = 1, later: int = 0, **more: Any
    ) -> None:
        """The next ``ops`` rows, or those after ``later`` others: ``count`` elements of 4 bytes each."""
        first = self.group._get_sequence_number_for_group() + 1 + later
        for seq in range(first, first + ops):
            line = {"rank": self.rank, "comm": self.group.group_name, "seq": seq, "op": op, "dtype": dtype}
            line |= {"count": count, "bytes": None if count is None else 4 * count}
            line |= {"root": None, "peer": None, "redop": None, "before_ns": time.monotonic_ns(), **more}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def reductions(self) -> None:
        for redop in ("sum", "product", "min", "max"):
            self.expect("all_reduce", 11, redop=redop)
            dist.all_reduce(torch.ones(11), getattr(dist.ReduceOp, redop.upper()))
        self.expect("all_reduce", 3 * 5 * 7, redop="sum")
        dist.all_reduce(torch.ones(3, 5, 7).transpose(0, 1).contiguous())
        self.expect("all_reduce", 1, "int32", redop="band")
        dist.all_reduce(torch.tensor(3, dtype=torch.int32), dist.ReduceOp.BAND)
        self.expect("all_reduce", 3 + 4, redop="sum")
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(4)])
        self.expect("all_reduce", None, redop="sum")
        dist.all_reduce(torch.eye(5).to_sparse())
        self.expect("reduce", 13, root=1, redop="max")
        dist.reduce(torch.ones(13), 1, dist.ReduceOp.MAX)

    def gathers(self) -> None:
        self.expect("all_gather", 17)
        dist.all_gather([torch.empty(17) for _ in range(SIZE)], torch.ones(17))
        self.expect("all_gather", 19)
        dist.all_gather_into_tensor(torch.empty(SIZE * 19), torch.ones(19))
        self.expect("gather", 7, root=1)
        dist.gather(torch.ones(7), [torch.empty(7) for _ in range(SIZE)] if self.rank == 1 else None, 1)

    def scatters(self) -> None:
        self.expect("scatter", SIZE * 5 if self.rank == 0 else 0, root=0)
        dist.scatter(torch.empty(5), [torch.ones(5) for _ in range(SIZE)] if self.rank == 0 else None, 0)
        # Gloo reduces a list tensor by tensor.
        self.expect("reduce_scatter", 7, ops=SIZE, redop="sum")
        dist.reduce_scatter(torch.empty(7), [torch.ones(7) for _ in range(SIZE)])
        self.expect("reduce_scatter", SIZE * 11, redop="max")
        dist.reduce_scatter_tensor(torch.empty(11), torch.ones(SIZE * 11), dist.ReduceOp.MAX)
        self.expect("all_reduce", 5, redop="sum")
        dist.all_reduce(torch.ones(5))
        # Rank 0 keeps 2 and sends 1, rank 1 sends 1 and keeps 3.
        splits = [2, 1] if self.rank == 0 else [1, 3]
        self.expect("all_to_all", sum(splits))
        dist.all_to_all_single(torch.empty(sum(splits)), torch.ones(sum(splits)), splits, splits)
        self.expect("all_to_all", SIZE * 13)
        dist.all_to_all([torch.empty(13) for _ in range(SIZE)], [torch.ones(13) for _ in range(SIZE)])

    def point_to_point(self) -> None:
        if self.rank == 0:
            self.expect("send", 23, peer=1)
            dist.send(torch.ones(23), 1)
            self.expect("send", 29, peer=1)
            dist.isend(torch.ones(29), 1).wait()
        else:
            self.expect("recv", 23, peer=0)
            dist.recv(torch.empty(23), 0)
            self.expect("recv", 29)
            dist.recv(torch.empty(29))

    def coalesced(self) -> None:
        self.expect("all_reduce", 3 + 4, redop="sum")
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        self.expect("all_gather", 5 + 6)
        with dist._coalescing_manager():
            for size in (5, 6):
                dist.all_gather_into_tensor(torch.empty(SIZE * size), torch.ones(size))
        # Gloo reduces tensor by tensor.
        self.expect("reduce_scatter", SIZE * 7, redop="max")
        self.expect("reduce_scatter", SIZE * 8, redop="max", later=1)
        with dist._coalescing_manager():
            for size in (7, 8):
                dist.reduce_scatter_tensor(torch.empty(size), torch.ones(SIZE * size), dist.ReduceOp.MAX)
        peer = 1 - self.rank
        first = self.group._get_sequence_number_for_group()
        self.expect("send", 31, peer=peer)
        self.expect("recv", 31, peer=peer, later=1)
        batch = [dist.P2POp(dist.isend, torch.ones(31), peer), dist.P2POp(dist.irecv, torch.empty(31), peer)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert self.group._get_sequence_number_for_group() == first + 2

    def barrier(self) -> None:
        self.expect("barrier", 0, None)
        dist.barrier()
        # Made of a message to rank 0 and its answer.
        peer = 1 - self.rank
        for later, op in enumerate(("recv", "send") if self.rank == 0 else ("send", "recv")):
            self.expect(op, 1, "int32", later=later, peer=peer)
        dist.monitored_barrier()


def main() -> None:
    dist.init_process_group("gloo")
    with open(sys.argv[1], "w") as file:
        calls = Calls(file)
        print("ready", flush=True)
        sys.stdin.readline()
        groups = calls.reductions, calls.gathers, calls.scatters, calls.point_to_point, calls.coalesced, calls.barrier
        for make in groups:
            make()
    print("done", flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
