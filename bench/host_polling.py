"""CPU that it costs to look at 8 ranks and 64 other processes each second, beside a reading of the same with psutil.

Ours: the sources of cpu.utilization (each second), host.memory, host.disk and host.pressure (each 5 s) and process.kmsg
(each second), with a real reader process; CPU of both processes, without the store. psutil: what nvitop and others ask
of each process, and of the threads of each rank. Both look in the same seconds, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow as pa
from running import cpu_ns

from probing.daemon.clock import SystemClock
from probing.daemon.host.cpu.source import CpuSource
from probing.daemon.host.kernel_log.source import KernelLogSource
from probing.daemon.host.node.source import NodeSource
from probing.daemon.ipc import Channel, Message
from probing.daemon.processes.target import Target
from probing.daemon.source import Identity, Loss

RANKS, THREADS, OTHERS = 8, 40, 64
# A tenth of the threads computes for a millisecond now and then, as those of a trainer do.
_RANK = """
import sys, threading, time
def run(busy):
    while True:
        time.sleep(0.05 if busy else 1)
        sum(range(20_000 if busy else 1))
for n in range(int(sys.argv[1]) - 1):
    threading.Thread(target=run, args=(n % 10 == 0,), daemon=True).start()
run(True)
"""


class Reader:
    """The readers of a source: one real reader process."""

    size = 1

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "probing.daemon.confined.reader"]
            self.process = subprocess.Popen(command, stdin=theirs)
        self._channel = Channel(ours)
        self.call("ping")

    def call(self, op: str, *, timeout: float = 20.0, patience: float | None = None, **args: Any) -> Message:
        del patience
        return self._channel.request({"op": op, **args}, timeout=max(timeout, 20.0))

    def call_each(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def forget(self, pid: int, start_ns: int) -> None: ...

    def close(self) -> None:
        self._channel.close()
        self.process.wait(10)


class Counted:
    """A sink that counts rows."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        self.rows[table] = self.rows.get(table, 0) + batch.num_rows

    def lost(self, loss: Loss) -> None: ...


class Watched:
    """The ranks, as discovery would name them."""

    def __init__(self, pids: list[int]) -> None:
        self._who = []
        for rank, pid in enumerate(pids):
            with Target(pid) as target:
                self._who.append(Identity(pid, target.start_ns, "bench", "0", "trainer", rank))

    def live(self) -> list[Identity]:
        return self._who


@contextlib.contextmanager
def processes(count: int, threads: int) -> Iterator[list[int]]:
    started = [subprocess.Popen([sys.executable, "-c", _RANK, str(threads)]) for _ in range(count)]
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


class Psutil:
    """What a monitor asks of each process each second."""

    def __init__(self, ranks: list[int], others: list[int]) -> None:
        self._ranks = [psutil.Process(pid) for pid in ranks]
        self._others = [psutil.Process(pid) for pid in others]

    def look(self) -> None:
        for process in (*self._ranks, *self._others):
            with process.oneshot():
                process.cpu_times(), process.memory_info(), process.status(), process.num_threads(), process.name()
                process.num_ctx_switches(), process.io_counters()
        for process in self._ranks:
            process.threads(), process.cpu_affinity()
        psutil.virtual_memory(), psutil.swap_memory(), psutil.disk_io_counters(perdisk=True), psutil.cpu_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=40)
    seconds = parser.parse_args().seconds
    with processes(RANKS, THREADS) as ranks, processes(OTHERS, 1) as others:
        time.sleep(2)
        reader, sink, clock = Reader(), Counted(), SystemClock()
        common = (reader, Watched(ranks), sink, clock, "bench")
        cpu, node = CpuSource(*common, 1.0), NodeSource(*common, 5.0)
        kernel_log = KernelLogSource("/dev/kmsg", sink, clock, "bench")
        rival = Psutil(ranks, others)
        spent = {"reader": 0, "collector": 0, "psutil": 0}
        # What comes once is not measured: files are opened, names are learned.
        for second in range(-5, seconds):
            next_ns = time.monotonic_ns() + 1_000_000_000
            if second == 0:
                spent = dict.fromkeys(spent, 0)
            before_reader, before = cpu_ns([reader.process.pid]), time.thread_time_ns()
            cpu.tick()
            kernel_log.tick()
            if second % 5 == 0:
                node.tick()
            spent["collector"] += time.thread_time_ns() - before
            spent["reader"] += cpu_ns([reader.process.pid]) - before_reader
            before = time.thread_time_ns()
            rival.look()
            spent["psutil"] += time.thread_time_ns() - before
            time.sleep(max(0, next_ns - time.monotonic_ns()) / 1e9)
        reader.close()
    ours = spent["reader"] + spent["collector"]
    print(
        f"{RANKS} ranks of {THREADS} threads, {OTHERS} other processes, {len(psutil.pids())} on the node, {seconds} s"
    )
    for name, ns in {"ours": ours, **spent}.items():
        print(f"{name:10} {ns / seconds / 1e7:6.3f} % of a core, {ns / seconds / 1e6:6.2f} ms a second")
    print(f"rows: {sink.rows}")


if __name__ == "__main__":
    main()
