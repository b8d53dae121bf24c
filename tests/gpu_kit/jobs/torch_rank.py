"""A rank of PyTorch with ProcessGroupNCCL on GPU 0. Its truths: CUDA events, flight recorder, torch's own counts."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

from lines import answer, here_is_no, serve

try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    here_is_no(f"torch: {e}")

BATCH = 100


class Timed:
    """Events behind operations of the current stream, as ``libraries.Timed`` has them."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)
        self._events: list[torch.cuda.Event] = []
        self._lo = time.time_ns()
        self._base.record()
        self._base.synchronize()
        self._hi = time.time_ns()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def ends(self) -> list[tuple[int, int]]:
        torch.cuda.synchronize()
        after = [round(self._base.elapsed_time(event) * 1e6) for event in self._events]
        return [(self._lo + ns, self._hi + ns) for ns in after]


class Rank:
    """Everything that the commands work on. ``train`` and ``load`` need no process group."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.kept: list[torch.Tensor] = []

    def init(self) -> dict[str, Any]:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.size, device_id=device)
        self.device = device
        self.data = torch.ones(1 << 18, device=device)
        return {"torch": torch.__version__, "nccl": list(torch.cuda.nccl.version())}

    def warm(self, times: str = "1", gap_s: str = "0") -> dict[str, Any]:
        """Makes so many operations of one element, as steadily as a training does."""
        for _ in range(int(times)):
            dist.all_reduce(self.data[:1])
            torch.cuda.synchronize()
            time.sleep(float(gap_s))
        return {}

    def burst(self, reduces: str, broadcasts: str, pairs: str, count: str) -> dict[str, Any]:
        """Makes so many all_reduce, broadcast, and send or recv, of ``count`` and more elements; waits for all."""
        calls: list[dict[str, Any]] = []
        timed = Timed()
        begun = time.time_ns()
        plan = [("all_reduce", int(count) + number) for number in range(int(reduces))]
        plan += [("broadcast", int(count) + number) for number in range(int(broadcasts))]
        plan += [("recv" if self.rank else "send", int(count))] * (int(pairs) if self.size > 1 else 0)
        for op, elements in plan:
            before = time.time_ns()
            self._call(op, self.data[:elements])
            timed.mark()
            root, peer = (0 if op == "broadcast" else None), (1 - self.rank if op in ("send", "recv") else None)
            calls.append(
                {"op": op, "count": elements, "root": root, "peer": peer, "before": before, "after": time.time_ns()}
            )
        # The watchdog looks ten times a second: without this all ends would be known by the synchronization alone.
        time.sleep(0.3)
        for call, end in zip(calls, timed.ends(), strict=True):
            call["end"] = end
        return {"calls": calls, "begun": begun}

    def trace(self) -> dict[str, Any]:
        """Returns what the flight recorder has: name, sizes and state of each operation, and when it was made, ns."""
        binding = torch._C._distributed_c10d
        dump = getattr(binding, "_dump_nccl_trace", None) or getattr(binding, "_dump_fr_trace", None)
        if dump is None:
            return {"entries": None}
        recorded = pickle.loads(dump(True, False, False))
        names = ("profiling_name", "input_sizes", "input_dtypes", "state", "is_p2p", "time_created_ns")
        return {"entries": [{name: entry.get(name) for name in names} for entry in recorded.get("entries", [])]}

    def join_all_reduce(self, count: str) -> None:
        """Begins an all_reduce and waits for it, as a training does; answers before it waits."""
        dist.all_reduce(self.data[: int(count)])
        answer(waits=True)
        torch.cuda.synchronize()

    def sleep_instead(self) -> None:
        answer(sleeps=True)
        the_rank_that_sleeps()

    def call_without_launch(self, count: str) -> None:
        """Calls an all_reduce in a group of NCCL that it never ends: it is not launched."""
        dist.distributed_c10d._get_default_group()._start_coalescing(self.device)
        self.work = dist.all_reduce(self.data[: int(count)], async_op=True)
        answer(sleeps=True)
        the_rank_that_does_not_launch()

    def launch(self, times: str) -> dict[str, Any]:
        """Launches one kernel so many times."""
        x = torch.zeros(64, device="cuda")
        x.add_(1)
        torch.cuda.synchronize()
        for _ in range(int(times)):
            x.add_(1)
        torch.cuda.synchronize()
        return {"sum": float(x[0])}

    def launch_rate(self, seconds: str, file: str) -> dict[str, Any]:
        """Launches a kernel over and over; writes the time of each 1,000, CLOCK_MONOTONIC ns."""
        x = torch.zeros(64, device="cuda")
        answer(begun=True)
        end = time.monotonic() + float(seconds)
        with Path(file).open("wb", buffering=0) as out:
            while time.monotonic() < end:
                for _ in range(1000):
                    x.add_(1)
                torch.cuda.synchronize()
                out.write(time.monotonic_ns().to_bytes(8, "little"))
        return {}

    def graph(self, launches: str) -> dict[str, Any]:
        x = torch.zeros(64, device="cuda")
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            x.add_(1)
        for _ in range(int(launches)):
            made.replay()
        torch.cuda.synchronize()
        return {"sum": float(x[0])}

    def alloc(self, times: str, size: str) -> dict[str, Any]:
        """Keeps tensors; returns how many allocations that took of the runtime, as torch's allocator counts them."""
        before = torch.cuda.memory_stats().get("num_device_alloc", 0)
        self.kept += [torch.empty(int(size), dtype=torch.uint8, device="cuda") for _ in range(int(times))]
        return {"device_allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - before}

    def load(self, seconds: str) -> dict[str, Any]:
        """Multiplies matrices in bfloat16 until the time is over; returns the operations a second, TFLOP/s."""
        size = 8192
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        a @ b
        torch.cuda.synchronize()
        answer(begun=True)
        begun, done = time.monotonic(), 0
        while time.monotonic() - begun < float(seconds):
            for _ in range(20):
                a @ b
            torch.cuda.synchronize()
            done += 20
        return {"tflops": done * 2 * size**3 / (time.monotonic() - begun) / 1e12}

    def hold(self) -> dict[str, Any]:
        """Makes a context on the first visible GPU."""
        self.kept.append(torch.zeros(1 << 20, device="cuda"))
        torch.cuda.synchronize()
        properties = torch.cuda.get_device_properties(0)
        return {"uuid": str(getattr(properties, "uuid", "")), "visible": torch.cuda.device_count()}

    def pace(self, seconds: str, gap_us: str, file: str) -> dict[str, Any]:
        """Repeats work of ``gap_us`` and a small all_reduce; writes the time of each 100, CLOCK_MONOTONIC ns."""
        turns = turns_of(float(gap_us) * 1e-6)
        answer(begun=True)
        end = time.monotonic() + float(seconds)
        with Path(file).open("wb", buffering=0) as out:
            while time.monotonic() < end:
                for _ in range(BATCH):
                    spin(turns)
                    dist.all_reduce(self.data[:1024])
                torch.cuda.synchronize()
                out.write(time.monotonic_ns().to_bytes(8, "little"))
        return {}

    def train(self, seconds: str, file: str) -> dict[str, Any]:
        """Trains a small model by DDP; writes the time of each step, CLOCK_MONOTONIC ns."""
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(12)))
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        data = torch.randn(512, 2048, device="cuda")
        for _ in range(5):
            train_step(model, optimizer, data)
        answer(begun=True)
        end = time.monotonic() + float(seconds)
        with Path(file).open("wb", buffering=0) as out:
            while time.monotonic() < end:
                train_step(model, optimizer, data)
                out.write(time.monotonic_ns().to_bytes(8, "little"))
        return {}

    def _call(self, op: str, tensor: torch.Tensor) -> None:
        if op == "all_reduce":
            dist.all_reduce(tensor)
        elif op == "broadcast":
            dist.broadcast(tensor, 0)
        elif op == "send":
            dist.send(tensor, 1 - self.rank)
        else:
            dist.recv(tensor, 1 - self.rank)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(data).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()


def the_rank_that_sleeps() -> None:
    while True:
        time.sleep(1)


def the_rank_that_does_not_launch() -> None:
    while True:
        time.sleep(1)


def spin(turns: int) -> None:
    for _ in range(turns):
        pass


def turns_of(seconds: float) -> int:
    """Returns how many turns of an empty loop take so long."""
    begun = time.perf_counter()
    spin(1_000_000)
    return round(seconds / (time.perf_counter() - begun) * 1_000_000)


def main() -> None:
    if not torch.cuda.is_available():
        here_is_no("torch finds no GPU")
    rank = Rank()
    names = ("init", "warm", "burst", "trace", "join_all_reduce", "sleep_instead", "call_without_launch")
    names += ("launch", "launch_rate", "graph", "alloc", "load", "hold", "pace", "train")
    serve({name: getattr(rank, name) for name in names})


if __name__ == "__main__":
    main()
