"""The real drain loop over the real store, killed at every step: each record of a ring comes into the log once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import store_support as support
from long import LONG

from probing.api.errors import StoreError
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.ring import Ring, RingMemory
from probing.daemon.clock import ClockPair
from probing.daemon.collector.drain import DrainLoop
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.source import RingConsumer
from probing.daemon.store import Store, StoreLimits

ROOT = Path("/state")
RECORD = np.dtype([("value", "<u8")])
SLOT = 16
SIZE = 1024
LIMITS = StoreLimits(part_bytes=2048, keep_free_bytes=0, max_age_s=1e9)
# More than twice what the ring holds: it wraps.
ROUNDS, EACH = 4, 40


class Consumer(np.ndarray[Any, Any]):
    """The consumer position: ``move`` moves it."""

    def __setitem__(self, at: Any, value: Any) -> None:
        self.move(int(value), lambda: super(Consumer, self).__setitem__(at, value))

    def move(self, new: int, set_it: Callable[[], None]) -> None:
        set_it()


class Kernel:
    """What lives on when the collector is killed: a ring, and the count of what was written to it."""

    def __init__(self) -> None:
        consumer = np.zeros(1, "<u8").view(Consumer)
        self.memory = RingMemory(consumer, np.zeros(1, "<u8"), memoryview(bytearray(2 * SIZE)), SIZE)
        self.consumer = consumer
        self.pushed = 0

    def push(self, count: int) -> None:
        """As many as fit."""
        for _ in range(count):
            end = int(self.memory.producer[0])
            if end + SLOT - int(self.memory.consumer[0]) > SIZE:
                return
            at = end % SIZE
            for half in (0, SIZE):
                self.memory.data[half + at : half + at + 4] = (8).to_bytes(4, "little")
                self.memory.data[half + at + 8 : half + at + 16] = self.pushed.to_bytes(8, "little")
            self.memory.producer[0] = end + SLOT
            self.pushed += 1


class Collector:
    """One life of it, over the files that the last one left."""

    def __init__(self, kernel: Kernel, files: support.MemoryFiles, *, holds: bool = False) -> None:
        clock = support.clock()
        self.kernel, self.files = kernel, files
        self.store = Store.open(ROOT, node="n1", clock=clock, limits=LIMITS, files=files, background=False)
        ring = Ring("collectives", kernel.memory, RECORD, map_id=7)
        self.looks = 0
        consumer = RingConsumer(assemble, "process.events", identified=True)
        self.loop = DrainLoop(
            self.store,
            {"collectives": ring},
            {"collectives": consumer},
            RowBuffer("n1", clock),
            clock,
            takes=self.takes if holds else None,
        )
        self.loop.resume()

    def takes(self, records: Any) -> int:
        """Now and then a process is not identified yet: some of its records, or all that there are, stay."""
        self.looks += 1
        return min(len(records), (len(records), 7, 0)[self.looks % 3])

    def live(self, rounds: int) -> None:
        for number in range(rounds):
            self.kernel.push(EACH)
            self.loop.once()
            if number == 1:
                self.store.seal(now=True)
            self.store.sync()


def assemble(records: Any, pair: ClockPair) -> dict[str, pa.RecordBatch]:
    rows = [{"node": "n1", "ts": pair.real_ns, "pid": value} for value in records["value"].tolist()]
    return {"process.events": batch_of("process.events", rows)}


def values(store: Store) -> list[int]:
    return sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())


def position(store: Store) -> int:
    return int(store.positions.get("collectives", {}).get("position", 0))


def watch(kernel: Kernel, files: support.MemoryFiles, log: bool = False) -> None:
    """Each move of the ring's position is a step like a change of a file. With ``log`` it is looked at what a kill at
    this instant leaves in the log: the position may only move to there."""

    def move(new: int, set_it: Callable[[], None]) -> None:
        files.operations += 1
        fault = files.fault(files.operations, "commit", ROOT) if files.fault else None
        if log:
            left = Collector(Kernel(), files.after_kill()).store
            assert position(left) >= new
            assert len(values(left)) >= new // SLOT
        set_it()
        if fault == "after":
            raise support.Crash

    kernel.consumer.move = move  # type: ignore[method-assign]


@functools.cache
def steps(*, holds: bool) -> list[str]:
    files, found = support.MemoryFiles(), list[str]()
    files.fault = lambda n, operation, path: found.append(operation)
    kernel = Kernel()
    watch(kernel, files, log=True)
    Collector(kernel, files, holds=holds).live(ROUNDS)
    assert holds or kernel.pushed == ROUNDS * EACH > 2 * SIZE // SLOT
    return found


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("how", ["before", "after", "torn", "EIO"])
def test_a_record_of_the_ring_is_in_the_log_once_wherever_the_collector_dies(how: str, holds: bool) -> None:
    every = steps(holds=holds)
    assert every.count("commit") >= (2 if holds else ROUNDS)
    # To die before a change is to die after the one before: in the gate a part of them shows it.
    for step in range(1, len(every) + 1, 1 if LONG or how == "after" else 3):
        if how == "torn" and every[step - 1] != "write":
            continue
        kernel, files = Kernel(), support.MemoryFiles()

        def fault(n: int, operation: str, path: Path, step: int = step) -> str | support.Torn | None:
            if n != step or (how == "EIO" and operation == "commit"):
                return None
            if how == "EIO":
                raise support.io_error()
            if how == "torn":
                return support.Torn(30 + step, support.Crash())
            if how == "after":
                return "after"
            raise support.Crash

        files.fault = fault
        watch(kernel, files)
        with contextlib.suppress(support.Crash, StoreError):
            Collector(kernel, files, holds=holds).live(ROUNDS)
        # WHEN another collector comes, and the kernel wrote on meanwhile
        files = files.after_kill()
        watch(kernel, files)
        kernel.push(5)
        after = Collector(kernel, files)
        after.live(2)
        # THEN all that the kernel wrote is in the log, once
        assert values(after.store) == list(range(kernel.pushed)), f"step {step}: {every[step - 1]}"
        assert after.store.recovery_losses == (), f"step {step}"
