"""A timeline of many operations in each format: rows a second, CPU time, peak memory. ``[OPERATIONS [RANKS]]``.

The rows are made when the client asks for them, so all time and memory are the client's. Each format is written by a
process of its own, and its bytes are dropped.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from probing.client.timeline.chrome import write_chrome
from probing.client.timeline.columns import write_columns
from probing.client.timeline.html import write_html
from probing.client.timeline.kineto import write_kineto
from probing.client.timeline.perfetto import write_perfetto
from probing.client.timeline.reading import Timeline
from probing.federation.execution.answer import Rows
from probing.federation.execution.clocks import Clocks

BEGIN, MS = 1_795_001_400_000_000_000, 1_000_000
OPS = ("all_reduce", "all_gather", "reduce_scatter")
BATCH = 50_000
STEP = 100 * MS
RANGE = re.compile(r"ts >= make_timestamp_ns\((\d+)\) AND ts < make_timestamp_ns\((\d+)\)")
WIDTH = re.compile(r"// (\d+)")


class Operations:
    """Answers like a cluster whose only rows are operations, one per rank and ms, and steps of 100 ms."""

    def __init__(self, rows: int, ranks: int) -> None:
        self.outcomes: list[Any] = []
        self.clocks = Clocks()
        self.ranks = ranks
        self.end = BEGIN + rows // ranks * MS

    def query_all(self, statements: Mapping[str, str]) -> dict[str, pa.Table]:
        nodes = pa.table({"node": [f"node{node}" for node in range(-(-self.ranks // 8))]})
        others = {"findings": pa.table({"finding_id": []}), "losses": pa.table({"node": []})}
        return {name: others.get(name, nodes) for name in statements}

    def query(self, sql: str) -> pa.Table:
        """Returns the number of rows in each bucket of time."""
        found, width = RANGE.search(sql), WIDTH.search(sql)
        every = self._every(sql)
        if found is None or width is None or not every:
            return pa.table({"bucket": [], "rows": []})
        low, high, wide = int(found[1]), min(int(found[2]), self.end), int(width[1])
        buckets = np.arange(0, -(-(high - low) // wide))
        return pa.table({"bucket": buckets, "rows": np.full(len(buckets), max(1, wide // every) * self.ranks)})

    def stream(self, sql: str) -> Rows:
        found, every = RANGE.search(sql), self._every(sql)
        assert found is not None
        first, last = ((min(int(time), self.end) - BEGIN) // every for time in found.groups())
        make = self._operations if every == MS else self._steps
        batch = make(first, first + 1)

        def batches() -> Generator[pa.RecordBatch, None, None]:
            rows = max(1, BATCH // self.ranks)
            for place in range(first, last, rows):
                yield make(place, min(last, place + rows))

        return Rows(batch.schema, batches(), [])

    def _every(self, sql: str) -> int:
        return MS if '"comm"."ops"' in sql else STEP if '"train"."steps"' in sql else 0

    def _who(self, first: int, last: int) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        number = np.repeat(np.arange(first, last), self.ranks)
        rank = np.tile(np.arange(self.ranks), last - first)
        texts = {"node": [f"node{node}" for node in range(-(-self.ranks // 8))], "run": ["r1"]}
        places = {"node": rank // 8, "run": rank * 0}
        shared = {name: pa.array(texts[name]).take(pa.array(places[name])) for name in texts}
        return number, {**shared, "pid": 1000 + rank, "start_ns": rank * 0 + 7, "rank": rank}

    def _operations(self, first: int, last: int) -> pa.RecordBatch:
        number, who = self._who(first, last)
        call = BEGIN + number * MS + who["rank"] * 1000
        kind = pa.array(number % 3)
        once = pa.array(number * 0)

        def text(*values: str) -> Any:
            return pa.array(values).take(kind if len(values) == 3 else once)

        return pa.RecordBatch.from_pydict(
            {
                **who,
                "comm": text("0", "1", "2"),
                "comm_name": text("default_pg", "tp", "dp"),
                "comm_size": np.full(len(number), self.ranks),
                "backend": text("nccl"),
                "seq": number // 3,
                "op": text(*OPS),
                "bytes": 4096 * (1 + number % 7),
                "ts": call,
                "state": text("done"),
                "t_start": pa.nulls(len(number), pa.int64()),
                "t_done_lo": call + 500_000,
                "t_done_hi": call + 520_000,
                "timing_source": text("watchdog"),
                "error": pa.nulls(len(number), pa.string()),
            }
        )

    def _steps(self, first: int, last: int) -> pa.RecordBatch:
        number, who = self._who(first, last)
        begin = BEGIN + number * STEP
        nothing = pa.nulls(len(number), pa.int64())
        times = {"step": number, "t_start": begin, "t_end": begin + STEP, "comm_ns": nothing, "wait_ns": nothing}
        return pa.RecordBatch.from_pydict({**who, **times})


class Nowhere:
    size = 0

    def write(self, data: bytes | memoryview) -> int:
        self.size += len(data)
        return len(data)


def one(kind: str, rows: int, ranks: int) -> None:
    made: Any = Operations(rows, ranks)
    sink: Any = Nowhere()
    writers: dict[str, Callable[[Timeline], object]] = {
        "perfetto": lambda taken: write_perfetto(taken, sink),
        "chrome": lambda taken: write_chrome(taken, sink),
        "columns": lambda taken: write_columns(taken, sink),
        "html": lambda taken: write_html(taken, sink),
        "kineto": kineto,
    }
    before = resource.getrusage(resource.RUSAGE_SELF)
    taken = Timeline(made, "j1", BEGIN, made.end, present=False)
    begun = time.perf_counter()
    writers[kind](taken)
    seconds = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{kind}: {taken.counts['operations']:,} operations and {taken.counts['steps']:,} steps of {ranks} ranks, "
        f"{taken.rows / seconds:,.0f} rows a second, {cpu:.1f} s of CPU, {sink.size / 1e6:,.0f} MB, "
        f"peak memory {used.ru_maxrss / 1024:.0f} MiB (before: {before.ru_maxrss / 1024:.0f})",
        flush=True,
    )


def kineto(taken: Timeline) -> None:
    with TemporaryDirectory() as directory:
        write_kineto(taken, Path(directory))


def main() -> None:
    if len(sys.argv) > 3:
        one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        return
    rows, ranks = [*sys.argv[1:], *("10000000", "64")[len(sys.argv) - 1 :]][:2]
    # Kineto files are really written and take 700 bytes an operation, so they get a tenth of the operations.
    for kind, share in (("perfetto", 1), ("chrome", 1), ("columns", 1), ("html", 1), ("kineto", 10)):
        subprocess.run([sys.executable, __file__, kind, str(int(rows) // share), ranks], check=True)


if __name__ == "__main__":
    main()
