"""What tests and benchmarks of the doubles share: the sources on a session as the collector has them, and the truth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
from doubles.doubles import Call, DoubleJob
from waiting import until

from probing.api.errors import NotFound
from probing.daemon.bpf.session import Session
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.config import CudaConfig
from probing.daemon.elf.symbols import find_symbols
from probing.daemon.gpu.cuda.source import CudaSource
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.source import Identity, Loss

__all__ = ("OBJECTS", "Watching", "expected", "plain", "until")

OBJECTS = ("gloo", "nccl", "cuda")
# ncclFunc_t, and which of its values NCCL names a root or a peer for, or a reduction.
_OPS = {0: "broadcast", 1: "reduce", 2: "all_gather", 3: "reduce_scatter", 4: "all_reduce", 6: "send", 7: "recv"}
_OPS |= {8: "all_to_all", 9: "scatter", 10: "gather"}
_ROOTED, _PEERED, _REDUCING = {0, 1, 9, 10}, {6, 7}, {1, 3, 4}
_DTYPES = (
    *(("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8), ("float16", 2)),
    *(("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1)),
)
_REDOPS = ("sum", "product", "max", "min", "avg")


class JobProcesses:
    """``Processes`` of the jobs alone: rank 5 of 8 of job1, say."""

    def __init__(self, jobs: Sequence[DoubleJob]) -> None:
        self._jobs = jobs

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        for number, job in enumerate(self._jobs):
            for rank, process in enumerate(job.ranks):
                if process.pid == pid:
                    return Identity(pid, start_ns, f"job{number}", "run", "trainer", rank, rank, len(job.ranks), 0)
        return None


class Nowhere:
    """A ``Sink`` for rows that these tests ignore."""

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        del table, batch

    def lost(self, loss: Loss) -> None:
        del loss


class Nobody:
    """``Readers`` that read nothing."""

    def call(self, op: str, *, pid: int = 0, start_ns: int = 0, timeout: float = 2.0, **args: Any) -> Any:
        raise NotFound(f"process {pid} is not read here")


class Watching:
    """A session and the sources on it. All times of rows are converted by one clock pair, so ``mono`` undoes it."""

    def __init__(self, session: Session, jobs: Sequence[DoubleJob]) -> None:
        self.session = session
        self.pair: ClockPair = SystemClock().pair()
        processes = JobProcesses(jobs)
        self.collectives = CollectivesSource(session, processes, "node", find_symbols)
        config = CudaConfig(memory=False)
        self.cuda = CudaSource(session, processes, "node", find_symbols, Nowhere(), Nobody(), SystemClock(), config)
        self.collectives.start()
        self.cuda.start()
        self.rows: list[dict[str, Any]] = []
        self.communicators: list[dict[str, Any]] = []
        self.count = 0

    def attach(self, *libraries: Path) -> int:
        """Returns the time when all probes were there, CLOCK_MONOTONIC ns."""
        for library in libraries:
            fd = os.open(library, os.O_RDONLY)
            try:
                path = os.fsencode(library)
                for source in (self.collectives, self.cuda):
                    if source.interesting(path):
                        source.attach(fd, path)
            finally:
                os.close(fd)
        return time.monotonic_ns()

    def stop(self) -> None:
        self.cuda.stop()
        self.collectives.stop()

    def drain(self, keep: bool = True) -> None:
        """Bring what waits in the rings into ``rows`` and ``communicators``; without ``keep`` rows are only counted."""
        self.session.heartbeat()
        self.cuda.close_rest()
        for ring, assemble in self._rings():
            drained = self.session.rings[ring].drain()
            if len(drained.records):
                self._take(assemble(drained.records, self.pair), keep)
            self.session.rings[ring].commit(drained.position)

    def _rings(self) -> list[tuple[str, Callable[[npt.NDArray[Any], ClockPair], Mapping[str, pa.RecordBatch]]]]:
        return [
            ("collectives", self.collectives.assemble),
            ("communicators", self.collectives.assemble_communicators),
            ("cuda_syncs", self.cuda.assemble_syncs),
        ]

    def _take(self, batches: Mapping[str, pa.RecordBatch], keep: bool) -> None:
        operations = batches.get("comm.ops")
        if operations is not None:
            self.count += operations.num_rows
            if keep:
                self.rows += plain(operations)
        if "comm.communicators" in batches:
            self.communicators += plain(batches["comm.communicators"])

    def wait_for_rows(self, count: int) -> list[dict[str, Any]]:
        def enough() -> bool:
            self.drain()
            return len(self.rows) >= count

        until(enough, what=lambda: f"{len(self.rows)} of {count} rows: {self.session.counters()}")
        self.drain()
        return self.rows

    def inflight(self) -> list[dict[str, Any]]:
        """Returns open operations; finished ones are in ``rows``."""
        self.drain()
        return plain(self.collectives.inflight(SystemClock().pair()))

    def mono(self, row: dict[str, Any], column: str = "") -> int | None:
        """The time of the call, or of ``column``, which counts from it, CLOCK_MONOTONIC ns."""
        called = int(row["ts"]) - self.pair.mono_to_utc_ns
        if not column:
            return called
        return None if row[column] is None else called + int(row[column])


def plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows with times as ns."""
    batch.validate(full=True)
    columns = {
        name: (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def expected(call: Call) -> dict[str, Any]:
    """The columns of ``comm.ops`` that an operation's arguments say, the communicator's among them."""
    dtype, size = _DTYPES[call.dtype]
    count = call.count
    if call.func in (3, 8) or (call.func == 9 and call.root == call.rank):
        count *= call.size
    elif call.func == 9:
        count = 0
    return {
        "pid": call.pid,
        "tid": call.tid,
        "backend": "nccl",
        "op": _OPS[call.func],
        "dtype": dtype,
        "count": count,
        "bytes": count * size,
        "redop": _REDOPS[call.redop] if call.func in _REDUCING else None,
        "root": call.root if call.func in _ROOTED else None,
        "peer": call.root if call.func in _PEERED else None,
        "stream": call.stream,
        "comm": call.comm,
        "comm_rank": call.rank,
        "comm_size": call.size,
    }
