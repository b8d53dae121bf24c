"""Whether a process notices that its stacks are read: the gaps between its own readings of the clock.

A Python program has a CPU of its own and only reads the clock. In blocks, in a random order for each
round, the daemon is asked for its stacks 50 times a second; or, as control, for those of an equal program elsewhere, so
that the machine is as busy; or other tools read its stacks. All processes but the target run on the other CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from deep_python import COARSE_NS, COUNTERS, FINE, FINE_NS, counter_of
from running import BIN, BenchDaemon, job, node_channel, set_config
from statistics_of_blocks import table

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

HERE = Path(__file__).resolve().parent
RATE = 50
LONG_NS = 5_000
RESAMPLES = 2_000
Counts = npt.NDArray[np.int64]
CONTROL = "the other program is dumped at 50 Hz (control)"


class Block(NamedTuple):
    """``counts`` of gaps by counter; context switches of the target, and the tracers that it was seen to have."""

    counts: Counts
    seconds: float
    voluntary: int
    involuntary: int
    looks: int
    tracers: int


class Figures(NamedTuple):
    p999_all: float
    p99: float
    p999: float
    longest: float
    a_second: float
    share: float


def edges() -> npt.NDArray[np.float64]:
    """ns at the upper end of each counter."""
    at = np.arange(COUNTERS, dtype=np.float64)
    return np.where(at < FINE, (at + 1) * FINE_NS, (at - FINE + 1) * COARSE_NS)


EDGES = edges()


def quantile(counts: Counts, q: float) -> float:
    passed = np.cumsum(counts)
    return float(EDGES[np.searchsorted(passed, q * passed[-1])])


def figures(blocks: list[Block]) -> Figures:
    """us, but ``a_second`` (how many long gaps) and ``share`` (% of the time that they take)."""
    counts = np.sum([b.counts for b in blocks], axis=0)
    seconds = sum(b.seconds for b in blocks)
    long = counts.copy()
    long[: counter_of(LONG_NS) + 1] = 0
    return Figures(
        quantile(counts, 0.999) / 1e3,
        quantile(long, 0.99) / 1e3,
        quantile(long, 0.999) / 1e3,
        float(EDGES[np.flatnonzero(long)[-1]]) / 1e3,
        float(long.sum()) / seconds,
        float((long * EDGES).sum()) / seconds / 1e7,
    )


def with_interval(blocks: list[Block]) -> list[str]:
    """Each figure with the 2.5 and 97.5 percentiles of a bootstrap over the blocks."""
    rng = np.random.default_rng(7)
    drawn = [figures([blocks[i] for i in rng.integers(0, len(blocks), len(blocks))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0)
    return [f"{v:.3g} [{a:.3g}, {b:.3g}]" for v, a, b in zip(figures(blocks), low, high, strict=True)]


def status_of(pid: int) -> tuple[int, int, int]:
    """(voluntary, involuntary switches, tracer)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "TracerPid")
    voluntary, involuntary, tracer = (int(fields[n]) for n in names)
    return voluntary, involuntary, tracer


class Target:
    def __init__(self, pid: int, path: Path) -> None:
        self.pid = pid
        self._counters = np.memmap(path, dtype=np.int64, mode="r", shape=(COUNTERS,))

    def block(self, seconds: float, act: Callable[[], None], period: float) -> Block:
        """Repeats ``act``, at most once in ``period``."""
        looks = tracers = 0
        first, begin, before = status_of(self.pid), time.monotonic(), np.array(self._counters)
        while (now := time.monotonic()) < begin + seconds:
            act()
            looks += 1
            tracers += status_of(self.pid)[2] != 0
            time.sleep(max(0.0, now + period - time.monotonic()))
        after, end, last = np.array(self._counters), time.monotonic(), status_of(self.pid)
        return Block(after - before, end - begin, last[0] - first[0], last[1] - first[1], looks, tracers)


@contextlib.contextmanager
def spinning(path: Path, cpu: int, nice: int) -> Iterator[int]:
    with job(HERE / "deep_python.py", "spin", path, ranks=1) as started:
        pid = started[0].pid
        os.sched_setaffinity(pid, {cpu})
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        while not path.exists() or path.stat().st_size < 8 * COUNTERS or not np.fromfile(path, np.int64).any():
            time.sleep(0.05)
        yield pid


def ask(stub: node_pb2_grpc.NodeStub, pid: int) -> None:
    reply = stub.Stacks(node_pb2.StacksRequest(pids=[pid], timeout_ms=1000), timeout=5)
    if reply.failures:
        raise SystemExit(f"process {pid}: {reply.failures[0].error.message}")


def run(*argv: str, pid: int) -> None:
    subprocess.run([BIN / argv[0], *argv[1:], str(pid)], check=True, capture_output=True)


def blocks_of(
    stub: node_pb2_grpc.NodeStub, target: Target, other: int, rounds: int, seconds: float
) -> dict[str, list[Block]]:
    kinds: dict[str, tuple[Callable[[], None], int]] = {
        CONTROL: (partial(ask, stub, other), 0),
        "dumped at 50 Hz": (partial(ask, stub, target.pid), 0),
        "sampled at 19 Hz, and the control": (partial(ask, stub, other), 19),
        "py-spy dump, one after the other": (partial(run, "py-spy", "dump", "--pid", pid=target.pid), 0),
        "py-spy dump --nonblocking": (partial(run, "py-spy", "dump", "--nonblocking", "--pid", pid=target.pid), 0),
    }
    chooser = random.Random(9)
    found: dict[str, list[Block]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in chooser.sample(list(kinds), len(kinds)):
            act, hz = kinds[name]
            set_config(stub, sampling_hz=str(hz))
            time.sleep(0.25)
            found[name].append(target.block(seconds, act, 1 / RATE))
        print(f"round {number + 1}", flush=True)
    return found


def row_of(name: str, blocks: list[Block]) -> dict[str, object]:
    all_, p99, p999, longest, count, share = with_interval(blocks)
    seconds = sum(b.seconds for b in blocks)
    return {
        "the target is": name,
        "looks/s": f"{sum(b.looks for b in blocks) / seconds:.0f}",
        "p99.9 of all gaps, us": all_,
        "p99 of those > 5 us": p99,
        "p99.9 of those": p999,
        "longest": longest,
        "gaps > 5 us a second": count,
        "% of time in them": share,
        "switches/s, voluntary and not": f"{sum(b.voluntary for b in blocks) / seconds:.1f}, "
        f"{sum(b.involuntary for b in blocks) / seconds:.1f}",
        "looks at which it had a tracer": sum(b.tracers for b in blocks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a block")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-gaps-"))
    first, *_, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    daemon = BenchDaemon()
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.close)
        target = ends.enter_context(spinning(folder / "target", last, 0))
        other = ends.enter_context(spinning(folder / "other", first, 19))
        daemon.start()
        time.sleep(5.0)
        stub = ends.enter_context(node_channel(daemon))
        found = blocks_of(stub, Target(target, folder / "target"), other, options.rounds, options.seconds)
    print(table([row_of(name, blocks) for name, blocks in found.items()]))
    rng = np.random.default_rng(5)
    # Blocks of the same round are drawn together.
    drawn = [rng.integers(0, options.rounds, options.rounds) for _ in range(RESAMPLES)]
    for name in list(found)[1:]:
        both = (found[name], found[CONTROL])
        of = [[figures([b[i] for i in chosen]).p999 for b in both] for chosen in drawn]
        ratios = [x / y for x, y in of]
        low, high = np.percentile(ratios, [2.5, 97.5])
        ratio = figures(both[0]).p999 / figures(both[1]).p999
        print(f"p99.9 of the gaps > 5 us beside the control's: {name}: {ratio:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
