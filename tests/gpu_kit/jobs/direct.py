"""A rank that calls NCCL and the CUDA runtime directly: ``direct.py --nccl F --cudart F --folder D``.

Each answer to ``burst`` has the calls that were made, with their own times: the truth of a part.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from pathlib import Path
from typing import Any

from libraries import Cuda, Nccl, Timed
from lines import answer, clock_offset_ns, serve

BYTES = 1 << 20
# Of the loop that costs are measured with: operations between two times that are written.
BATCH = 100


class Rank:
    """Everything that the commands work on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(options.folder)
        self.cuda, self.nccl = Cuda(options.cudart), Nccl(options.nccl)
        self.stream = self.cuda.stream()
        # One for what is sent, and one for what is received.
        self.buffer, self.other = self.cuda.malloc(BYTES), self.cuda.malloc(BYTES)
        self.calls: list[dict[str, Any]] = []

    def init(self) -> dict[str, Any]:
        """Makes the communicator; answers what NCCL's own functions say of it."""
        self.nccl.join(self.folder, self.rank, self.size)
        said = {name: self.nccl.number(f"ncclComm{name}") for name in ("Count", "UserRank", "CuDevice")}
        return {"comm": self.nccl.comm.value, "nccl": self.nccl.version, **said}

    def warm(self, times: str = "1", gap_s: str = "0") -> dict[str, Any]:
        """Makes so many operations of one element, as steadily as a training does."""
        for _ in range(int(times)):
            self.nccl.all_reduce(self.buffer, 1, self.stream)
            self.cuda.check("cudaStreamSynchronize", self.stream)
            time.sleep(float(gap_s))
        return {}

    def burst(self, reduces: str, broadcasts: str, pairs: str, count: str) -> dict[str, Any]:
        """Makes so many all_reduce, broadcast, and send and recv, of ``count`` and more elements; waits for all."""
        self.calls = []
        timed = Timed(self.cuda, self.stream)
        begun = time.time_ns()
        for number in range(int(reduces)):
            self._call("all_reduce", int(count) + number, timed)
        for number in range(int(broadcasts)):
            self._call("broadcast", int(count) + number, timed, root=self.size - 1)
        for _ in range(int(pairs)):
            self._pair(int(count), timed)
        for call, end in zip(self.calls, timed.ends(), strict=True):
            call["end"] = end
        return {"calls": self.calls, "begun": begun, "offset": clock_offset_ns()}

    def join_all_reduce(self, count: str) -> None:
        """Begins an all_reduce and waits for it, as a training does; answers before it waits."""
        self.begin_all_reduce(count)
        answer(waits=True)
        self.cuda.check("cudaStreamSynchronize", self.stream)

    def begin_all_reduce(self, count: str) -> dict[str, Any]:
        """Begins an all_reduce, with an event behind it as frameworks record one, and waits for nothing."""
        self.nccl.all_reduce(self.buffer, int(count), self.stream)
        self.cuda.check("cudaEventRecord", self.cuda.event(), self.stream)
        return {}

    def sleep_instead(self) -> None:
        answer(sleeps=True)
        the_rank_that_sleeps()

    def call_without_launch(self, count: str) -> None:
        """Calls an all_reduce in a group that it never ends: it is not launched."""
        self.nccl.check("ncclGroupStart")
        self.nccl.all_reduce(self.buffer, int(count), self.stream)
        answer(sleeps=True)
        the_rank_that_does_not_launch()

    def abort(self) -> dict[str, Any]:
        self.nccl.check("ncclCommAbort", self.nccl.comm)
        return {}

    def graph(self, captured: str, launches: str, count: str) -> dict[str, Any]:
        begun = time.time_ns()
        self.cuda.capture(self.stream)
        for _ in range(int(captured)):
            self.nccl.all_reduce(self.buffer, int(count), self.stream)
        executable = self.cuda.captured(self.stream)
        for _ in range(int(launches)):
            self.cuda.check("cudaGraphLaunch", executable, self.stream)
        self.cuda.check("cudaStreamSynchronize", self.stream)
        return {"begun": begun}

    def syncs(self, streams: str, events: str, devices: str) -> dict[str, Any]:
        begun = time.time_ns()
        event = self.cuda.event()
        self.cuda.check("cudaEventRecord", event, self.stream)
        for name, times, args in (
            ("cudaStreamSynchronize", streams, (self.stream,)),
            ("cudaEventSynchronize", events, (event,)),
            ("cudaDeviceSynchronize", devices, ()),
        ):
            for _ in range(int(times)):
                self.cuda.check(name, *args)
        return {"begun": begun, "stream": self.stream.value, "event": event.value}

    def alloc(self, times: str, size: str, freed: str) -> dict[str, Any]:
        made = [self.cuda.malloc(int(size)) for _ in range(int(times))]
        for pointer in made[: int(freed)]:
            self.cuda.check("cudaFree", pointer)
        return {}

    def launch(self, times: str) -> dict[str, Any]:
        """Launches a kernel of the double, which does nothing; a real runtime needs a kernel of its own."""
        function = ctypes.cast(self.nccl.library.ncclGetVersion, ctypes.c_void_p)
        for _ in range(int(times)):
            self.cuda.launch(function, self.stream)
        return {}

    def pace(self, seconds: str, gap_us: str, file: str) -> dict[str, Any]:
        """Repeats work of ``gap_us`` and a small all_reduce; writes the time of each 100, CLOCK_MONOTONIC ns."""
        turns = turns_of(float(gap_us) * 1e-6)
        event = self.cuda.event()
        end = time.monotonic() + float(seconds)
        answer(begun=True)
        with Path(file).open("wb", buffering=0) as out:
            while time.monotonic() < end:
                for _ in range(BATCH):
                    spin(turns)
                    self.nccl.all_reduce(self.buffer, 1024, self.stream)
                    self.cuda.check("cudaEventRecord", event, self.stream)
                    self.cuda.library.cudaEventQuery(event)
                self.cuda.check("cudaStreamSynchronize", self.stream)
                out.write(time.monotonic_ns().to_bytes(8, "little"))
        return {}

    def _call(self, op: str, count: int, timed: Timed, root: int | None = None) -> None:
        before = time.time_ns()
        if root is None:
            self.nccl.all_reduce(self.buffer, count, self.stream)
        else:
            self.nccl.broadcast(self.buffer, count, root, self.stream)
        timed.mark()
        self._note(op, count, before, root=root)

    # With one rank to itself, in a group; with two from the first to the second.
    def _pair(self, count: int, timed: Timed) -> None:
        before = time.time_ns()
        if self.size == 1:
            self.nccl.check("ncclGroupStart")
            self.nccl.send(self.buffer, count, 0, self.stream)
            self.nccl.receive(self.other, count, 0, self.stream)
            self.nccl.check("ncclGroupEnd")
            timed.mark()
            timed.mark()
            self._note("send", count, before, peer=0)
            self._note("recv", count, before, peer=0)
            return
        if self.rank == 0:
            self.nccl.send(self.buffer, count, 1, self.stream)
        else:
            self.nccl.receive(self.buffer, count, 0, self.stream)
        timed.mark()
        self._note("recv" if self.rank else "send", count, before, peer=1 - self.rank)

    def _note(self, op: str, count: int, before: int, root: int | None = None, peer: int | None = None) -> None:
        self.calls.append(
            {"op": op, "count": count, "root": root, "peer": peer, "before": before, "after": time.time_ns()}
        )


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
    parser = argparse.ArgumentParser()
    for name in ("nccl", "cudart", "folder"):
        parser.add_argument(f"--{name}", required=True)
    rank = Rank(parser.parse_args())
    names = (
        "init",
        "warm",
        "burst",
        "join_all_reduce",
        "begin_all_reduce",
        "sleep_instead",
        "call_without_launch",
        "abort",
        "graph",
    )
    serve({name: getattr(rank, name) for name in (*names, "syncs", "alloc", "launch", "pace")})


if __name__ == "__main__":
    main()
