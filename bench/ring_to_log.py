"""Throughput of the collector from ring to log, on one core: drain, assembly, append, commit.

The ring lies in this process's own memory, laid out as the kernel would map it. It is filled again and again with
records as a job of 16 ranks on 6 communicators makes them. All the rest is the collector's own code and a real state
directory.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from statistics_of_blocks import table

from probing.daemon.bpf.capabilities import detect
from probing.daemon.bpf.libbpf import Object
from probing.daemon.bpf.loader import read_object
from probing.daemon.bpf.ring import Ring, RingMemory
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector.drain import DrainLoop
from probing.daemon.collector.recordings import Unknown
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.nccl_uprobes.operations.rows import finished_rows
from probing.daemon.nccl_uprobes.operations.source import RING
from probing.daemon.nccl_uprobes.records.operations import OperationDecoder
from probing.daemon.source import RingConsumer
from probing.daemon.store.limits import StoreLimits
from probing.daemon.store.store import Store

RING_BYTES = 16 << 20
NAMES = np.array([b"0", b"1", b"tp", b"pp", b"dp", b"ep"], "S48")


def records_like_a_job(record: np.dtype[np.void], count: int, now: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Returns ``count`` finished all_reduce, broadcast and all_gather of 16 processes, in the order of time."""
    rng = np.random.default_rng(5)
    made = np.zeros(count, record)
    group = rng.integers(0, len(NAMES), count)
    process = rng.integers(0, 16, count)
    made["tgid"] = 4000 + process
    made["tid"] = made["tgid"]
    made["start_ns"] = 10_000_000 * (1 + process)
    made["object"] = rng.integers(1 << 46, 1 << 47, count)
    made["comm"] = 0x7F0000000000 + 4096 * group + process
    made["comm_rank"], made["comm_size"] = process, 16
    made["backend"], made["state"], made["timing"], made["name_form"] = 1, 3, 1, 1
    made["op"] = rng.choice([0, 1, 4], count, p=[0.1, 0.7, 0.2])
    made["dtype"] = 6
    made["redop"], made["async_op"] = 0, 1
    made["seq"] = np.arange(count) // 96
    made["count"] = rng.choice([1 << 10, 1 << 16, 1 << 20, 25_557_032], count)
    for field in ("root", "peer", "cuda_device"):
        made[field] = -1
    made["t_call"] = now + np.arange(count) * 1000 + rng.integers(0, 900, count)
    made["t_start"] = made["t_call"] + rng.integers(20_000, 400_000, count).astype(np.uint64)
    made["t_done_hi"] = made["t_start"] + rng.integers(200_000, 9_000_000, count).astype(np.uint64)
    made["t_done_lo"] = made["t_done_hi"]
    made["name"] = NAMES[group].view(f"V{NAMES.itemsize}") if record["name"].kind == "V" else NAMES[group]
    return made


def ring_of(record: np.dtype[np.void]) -> tuple[Ring, RingMemory, int]:
    """Returns a full ring as the kernel lays it out, its memory, and the number of its records."""
    slot = 8 + -(-record.itemsize // 8) * 8
    count = RING_BYTES // slot
    data = np.zeros(RING_BYTES, np.uint8)
    shape = np.dtype({"names": ["length", "record"], "formats": ["<u4", record], "offsets": [0, 8], "itemsize": slot})
    slots = np.frombuffer(data, shape, count)
    slots["length"] = record.itemsize
    slots["record"] = records_like_a_job(record, count, time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 10**9)
    memory = RingMemory(np.zeros(1, "<u8"), np.zeros(1, "<u8"), memoryview(data), RING_BYTES)
    return Ring(RING, memory, record), memory, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--drain", type=int, default=0, help="number of records of a drain; 0: the whole ring")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    name, source = read_object("gloo", detect())
    with Object(name, source) as loaded:
        record = loaded.btf.record(RING)
    ring, memory, capacity = ring_of(record)
    drain = min(options.drain or capacity, capacity)
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    clock = SystemClock()
    decoder = OperationDecoder(Unknown())

    def assemble(records: np.ndarray[tuple[int], np.dtype[np.void]], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        return {"comm.ops": finished_rows("bench", records, decoder.decode(records), pair)}

    seconds: list[float] = []
    with Store.open(folder / "state", node="bench", clock=clock, limits=StoreLimits(), background=False) as store:
        consumers = {RING: RingConsumer(assemble, "comm.ops")}
        loop = DrainLoop(store, {RING: ring}, consumers, RowBuffer("bench", clock), clock)
        slot = RING_BYTES // capacity
        for _ in range(options.rounds):
            # Sets both positions back to the begin of the ring, so that the same records are drained again.
            memory.consumer[0] = memory.producer[0] = 0
            memory.producer[0] = drain * slot
            begin = time.process_time()
            loop.once()
            seconds.append(time.process_time() - begin)
        stored = store.status()["rows"]
        begin = time.process_time()
        while store.seal(now=True):
            pass
        sealing = time.process_time() - begin
        segments = store.status()
    per_row = segments["tables"]["comm.ops"]["bytes"] / segments["tables"]["comm.ops"]["rows"]
    shutil.rmtree(folder)
    rate = drain / statistics.median(seconds)
    print(
        table(
            [
                {
                    "ring to log, one core": f"drains of {drain} records",
                    "records/s (median)": f"{rate / 1e6:.2f} M",
                    "slowest drain": f"{drain / max(seconds) / 1e6:.2f} M/s",
                    "rows in the log": stored,
                    "sealing": f"{options.rounds * drain / sealing / 1e6:.2f} M rows/s",
                    "bytes a sealed row": f"{per_row:.1f}",
                }
            ]
        )
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"record: {record.itemsize} bytes; peak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()
