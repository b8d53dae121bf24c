"""A job on two nodes as rows of tables, and tables that answer in place of a cluster."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import Any

import duckdb
import pyarrow as pa

from probing.api.tables import TABLES
from probing.client.timeline.reading import Timeline
from probing.federation.execution.answer import Answered, Gathered, Rows
from probing.federation.execution.clocks import Clocks, Offset

__all__ = (
    "BEGIN",
    "JOB",
    "MS",
    "SECOND",
    "RowsOfTables",
    "Tables",
    "communication",
    "counters",
    "finding",
    "loss",
    "operation",
    "sample",
    "stack",
    "step",
    "timeline_of",
)

MS = 1_000_000
SECOND = 1_000_000_000
# 11:30 UTC
BEGIN = 1_795_001_400 * SECOND
JOB = "4711.0"
NODES = {0: "alpha", 1: "alpha", 2: "alpha", 3: "beta", 4: "beta"}


# The tables that a timeline reads.
_READ = (
    *("comm.ops", "comm.inflight", "train.steps", "python.samples", "python.stacks", "gpu.utilization"),
    *("net.interfaces", "diagnosis.findings", "probing.losses", "process.processes"),
)
RowsOfTables = dict[str, list[dict[str, Any]]]


class Tables:
    """Answers SQL as a cluster does, from one database. ``ahead``: by how many ns the clocks of nodes are ahead."""

    def __init__(self, rows: RowsOfTables, ahead: Mapping[str, Offset] | None = None) -> None:
        self.db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
        for table in _READ:
            self.db.execute(f"CREATE SCHEMA IF NOT EXISTS {table.split('.')[0]}")
            self.db.register("given", TABLES[table].logical.empty_table())
            self.db.execute(f"CREATE TABLE {table} AS SELECT * FROM given")
            self.db.unregister("given")
        for table, given in rows.items():
            self.put(table, given)
        self.clocks = Clocks()
        self.outcomes: list[Gathered[Any]] = []
        self.warnings: list[str] = []
        gathered: Gathered[int] = Gathered(("alpha", "beta"))
        for node in ("alpha", "beta"):
            gathered.answered.append(Answered(node, node, 0))
            if ahead is not None and node in ahead:
                self.clocks.add(node, ahead[node], time.monotonic_ns())
        self.outcomes.append(gathered)

    def put(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Replaces the rows of a table."""
        schema = TABLES[table].logical
        given = [{column: row.get(column) for column in schema.names} for row in rows]
        self.db.register("given", pa.Table.from_pylist(given, schema=schema))
        self.db.execute(f"DELETE FROM {table}; INSERT INTO {table} SELECT * FROM given")
        self.db.unregister("given")

    def query(self, sql: str) -> pa.Table:
        return self.db.sql(sql).to_arrow_table()

    def query_all(self, statements: Mapping[str, str]) -> dict[str, pa.Table]:
        return {name: self.query(sql) for name, sql in statements.items()}

    def stream(self, sql: str) -> Rows:
        reader = self.db.cursor().sql(sql).to_arrow_reader(50_000)

        def batches() -> Generator[pa.RecordBatch, None, None]:
            yield from reader

        return Rows(reader.schema, batches(), list(self.warnings))


def timeline_of(tables: Any, seconds: float = 60.0, *, begin: int = BEGIN, present: bool = False) -> Timeline:
    return Timeline(tables, JOB, begin, begin + round(seconds * SECOND), present=present)


def who(rank: int) -> dict[str, Any]:
    return {"node": NODES[rank], "job": JOB, "run": "r1", "pid": 1000 + rank, "start_ns": 7 * SECOND, "rank": rank}


def operation(
    rank: int, seq: int | None, call: int, took: int = 5 * MS, node_ahead: int = 0, **more: Any
) -> dict[str, Any]:
    """A row of comm.ops, called ``call`` ns after BEGIN; it is gloo's, and took ``took`` ns.

    The clock of its node is ``node_ahead`` ns ahead.
    """
    at = BEGIN + call + node_ahead
    return {
        **who(rank),
        "ts": at,
        "t_call": at,
        "tid": 1000 + rank,
        "comm": "0",
        "comm_name": "default_pg",
        "comm_rank": rank,
        "comm_size": 5,
        "backend": "gloo",
        "seq": seq,
        "op": "all_reduce",
        "bytes": 4096,
        "t_start": at,
        "t_done_lo": at + took,
        "t_done_hi": at + took,
        "timing_source": "exact",
        "state": "done",
        **more,
    }


def communication() -> list[dict[str, Any]]:
    """23 operations of all five ranks, of which another rank is late each time, and 11 of ranks 1 and 4."""
    whole = [
        operation(rank, n, n * 500 * MS + (7 * MS if n % 5 == rank else rank * 1000), took=29 * MS)
        for n in range(23)
        for rank in range(5)
    ]
    pair = {"comm": "1", "comm_name": "tp", "comm_size": 2, "op": "broadcast", "bytes": 31}
    return whole + [operation(rank, n, n * SECOND + 100 * MS, **pair) for n in range(11) for rank in (1, 4)]


def counters() -> RowsOfTables:
    """Values of a GPU and an interface of alpha; some are NULL or no number, some of nodes without the job."""
    gpu = [
        {"node": node, "ts": BEGIN + n * SECOND, "device_id": 0, "gpu_util_pct": 50.5 + n, "power_w": watt}
        for node in ("alpha",)
        for n, watt in enumerate((300.25, None, 311.0, 290.0, 280.0, 270.0, 260.0))
    ]
    net = [
        {"node": node, "ts": BEGIN + n * SECOND, "interface": name, "kind": kind, "rx_gbps": rx}
        for node, name, kind in (
            ("alpha", "eth0", "physical"),
            ("beta", "lo", "loopback"),
            ("gamma", "eth0", "physical"),
        )
        for n, rx in enumerate((1.5, float("nan"), 2.5, float("inf"), 3.5))
    ]
    return {"gpu.utilization": gpu, "net.interfaces": net}


def step(rank: int, number: int, begin: int, end: int, **more: Any) -> dict[str, Any]:
    """A row of train.steps, from ``begin`` to ``end`` ns after BEGIN."""
    times = {"ts": BEGIN + begin, "t_start": BEGIN + begin, "t_end": BEGIN + end, "duration_ns": end - begin}
    return {**who(rank), **times, "step": number, "comm_ns": 3 * MS, "wait_ns": None, **more}


def sample(rank: int, stack_id: int, at: int, **more: Any) -> dict[str, Any]:
    """A row of python.samples, ``at`` ns after BEGIN."""
    shown = {"tid": 1000 + rank, "thread": "python", "stack_id": stack_id, "trains": True, "on_cpu": True, "gil": True}
    return {**who(rank), "ts": BEGIN + at, **shown, "count": 11, "duration_ns": 110 * MS, **more}


def stack(stack_id: int, *frames: tuple[str, str, int], node: str = "alpha") -> dict[str, Any]:
    """A row of python.stacks; ``frames`` innermost first."""
    named = [{"func": func, "file": file, "lineno": line} for func, file, line in frames]
    return {"node": node, "ts": BEGIN, "stack_id": stack_id, "complete": True, "frames": named}


def finding(opened: int, closed: int | None, **more: Any) -> dict[str, Any]:
    """A row of diagnosis.findings."""
    return {
        "node": "alpha",
        "ts": BEGIN + (opened if closed is None else closed),
        "job": JOB,
        "run": "r1",
        "finding_id": f"f{opened}",
        "verdict": "slow_rank",
        "severity": "warning",
        "state": "open" if closed is None else "closed",
        "confidence": 0.9,
        "sentence": "rank 3 is slow",
        "ranks": "3",
        "opened": BEGIN + opened,
        "closed": None if closed is None else BEGIN + closed,
        **more,
    }


def loss(begin: int, end: int, **more: Any) -> dict[str, Any]:
    """A row of probing.losses."""
    times = {"ts": BEGIN + end, "ts_from": BEGIN + begin, "ts_to": BEGIN + end}
    row = {"node": "beta", "source": "collectives", "table_name": "comm.ops", "stage": "ring", "reason": "ring full"}
    return {**row, **times, "pid": None, "count": 19, **more}
