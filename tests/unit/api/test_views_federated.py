"""A SELECT over views gives the rows of the same SELECT over the union of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from federation_support import assert_same, run_here

from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.views import VIEWS
from probing.federation.execution.answer import Reply
from probing.federation.planning.catalog import api_catalog
from probing.federation.planning.split import Plan, plan
from probing.federation.sql.dialect import parse, to_sql
from probing.federation.sql.headings import with_headings
from probing.federation.sql.times import fix_times
from probing.federation.sql.views import expand

NOW_NS = 1_790_000_000_123_456_789
SECOND = 10**9
NAMES = ("n0", "n1", "n2")
READ = (
    "comm.ops",
    "train.steps",
    "process.processes",
    "cluster.members",
    "cuda.memory",
    "gpu.processes",
    "probing.table_docs",
)
OWN = {
    view.name: view
    for view in (
        View("view.slow", "", (), "SELECT *, duration_ms / 1e3 AS s FROM python.comm_collective WHERE bytes > 3072"),
        View("view.all", "", (), "SELECT * FROM view.slow"),
        View("view.worst", "", (), "SELECT op, max(duration_ms) AS ms FROM python.comm_collective GROUP BY op"),
        View("view.recent", "", (), "SELECT op, seq FROM comm.ops WHERE ts > now() - INTERVAL 18 SECOND"),
    )
}
VIEWS_HERE = {**VIEWS, **OWN}


def rows_of(node: str) -> dict[str, list[dict[str, Any]]]:
    """Processes of equal pids on all nodes: what is joined by them must not meet across nodes."""
    number = NAMES.index(node)
    who = {"node": node, "job": "j", "run": "0", "pid": 7, "start_ns": 70, "rank": number}
    start = NOW_NS - 20 * SECOND + number * 1000
    return {
        "comm.ops": [
            {
                **who,
                "ts": start + i * SECOND // 4,
                "op": ("all_reduce", "broadcast", "send")[i % 3],
                "seq": i,
                "peer": 1,
                "comm": "c",
                "comm_rank": number,
                "root": 0,
                "bytes": i << 10,
                "backend": "nccl",
                "duration_ns": i * 100_000 + number,
            }
            for i in range(24)
        ],
        "train.steps": [
            {
                **who,
                "ts": start + i * SECOND,
                "t_end": start + (i + 1) * SECOND - 1,
                "step": i + number,
                "duration_ns": SECOND,
            }
            for i in range(4)
        ],
        "process.processes": [
            {
                **who,
                "ts": NOW_NS,
                "role": "trainer",
                "state": "running",
                "local_rank": 0,
                "world_size": 3,
                "node_rank": number,
            }
        ],
        "cluster.members": [{"node": node, "member": other, "address": f"{other}:1"} for other in NAMES],
        "cuda.memory": [
            {
                **who,
                "ts": start + i * SECOND,
                "kind": "device",
                "size_class": 1,
                "stack": 1,
                "live_bytes": (i + number) << 20,
            }
            for i in range(3)
        ],
        "gpu.processes": [
            {**who, "ts": start + i * SECOND // 2, "device_id": i % 2, "used_bytes": (i + number) << 20}
            for i in range(4)
        ],
        "probing.table_docs": [{"node": node, "table_schema": "comm", "table_name": "ops", "live": "no"}],
    }


def database(*nodes: str) -> duckdb.DuckDBPyConnection:
    db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
    tables = [rows_of(node) for node in nodes]
    for name in READ:
        rows = [row for node in tables for row in node[name]]
        schema = TABLES[name].logical
        full = [{column: row.get(column) for column in schema.names} for row in rows]
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
        db.register("given", pa.Table.from_pylist(full, schema=schema))
        db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


class Cluster:
    def __init__(self) -> None:
        self.nodes = {name: database(name) for name in NAMES[:2]}
        self.union = database(*NAMES[:2])

    def plan(self, sql: str) -> Plan:
        return plan(sql, NOW_NS, api_catalog(), VIEWS_HERE)

    def together(self, sql: str) -> pa.Table:
        def ask(address: str, part: str, seconds: float) -> Reply:
            with self.nodes[address].cursor() as cursor:
                return Reply(address, cursor.sql(part).to_arrow_table())

        return run_here(self.plan(sql), list(self.nodes), ask).table

    def alone(self, sql: str) -> pa.Table:
        return self.union.sql(
            to_sql(fix_times(expand(with_headings(parse(sql), sql), VIEWS_HERE), NOW_NS))
        ).to_arrow_table()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for db in (*made.nodes.values(), made.union):
        db.close()


def values(table: pa.Table) -> list[tuple[Any, ...]]:
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in table.columns]
    return sorted(zip(*(column.to_pylist() for column in columns), strict=True), key=repr)


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("SELECT * FROM python.comm_collective", "rows"),
        ("SELECT * FROM global.python.comm_collective", "rows"),
        ("SELECT * FROM python.torch_trace WHERE ts > now() - INTERVAL 19 SECOND", "rows"),
        ("SELECT * FROM global.cluster.nodes", "rows"),
        ("SELECT op, avg(duration_ms) AS ms, count(*) FROM python.comm_collective GROUP BY op", "aggregate"),
        ("SELECT _host, _rank, max(global_step) FROM global.python.comm_collective c GROUP BY ALL", "aggregate"),
        ("SELECT _addr, _local_rank, _node_rank, sum(bytes) FROM global.comm.ops GROUP BY 1, 2, 3", "aggregate"),
        ("SELECT rank, avg(allocated), max(allocated) FROM python.torch_trace GROUP BY rank", "aggregate"),
        ("SELECT table_name, count(*) FROM information_schema.tables GROUP BY 1", "aggregate"),
        ("SELECT rank, step FROM python.torch_trace WHERE step = (SELECT max(step) FROM python.torch_trace)", "ship"),
        (
            "SELECT c.op, t.step FROM python.comm_collective c JOIN python.torch_trace t"
            " ON c.global_step = t.global_step AND c.rank = t.rank AND c.role = t.role",
            "ship",
        ),
        (
            "WITH s AS (SELECT global_step, _rank, max(duration_ms) AS ms"
            " FROM global.python.comm_collective GROUP BY ALL)"
            " SELECT global_step, avg(ms), count(*) FROM s GROUP BY 1",
            "ship",
        ),
        ("SELECT python.torch_trace.step FROM probe.python.torch_trace", "rows"),
        ("SELECT operation, count(*) FROM python.nccl_trace WHERE step IS NULL GROUP BY 1", "aggregate"),
        ("SELECT * FROM nccl.proxy_ops", "local"),
        ("SELECT t.ts FROM python.comm_collective AS t(ts, node) WHERE t.ts = 'n1'", "ship"),
        ("SELECT t.ts FROM comm.ops AS t(ts, node) WHERE t.ts = 'n1'", "ship"),
        ("SELECT op, s FROM view.all WHERE op <> 'send' ORDER BY s", "rows"),
        ("SELECT _rank, count(*) FROM global.view.slow GROUP BY 1", "aggregate"),
        ("SELECT * FROM view.worst", "ship"),
        ("SELECT op, count(*) FROM view.recent GROUP BY op", "aggregate"),
        ("SELECT w.op, ms, seq FROM view.worst w JOIN view.recent r USING (op) WHERE seq > 3", "ship"),
        (
            "SELECT o.seq, s.step FROM comm.ops o ASOF JOIN train.steps s ON o.node = s.node AND o.ts >= s.ts"
            " WHERE o.seq > 5 AND s.step < 3",
            "ship",
        ),
    ],
)
def test_views_of_all_nodes(cluster: Cluster, sql: str, kind: str) -> None:
    assert cluster.plan(sql).kind == kind
    got, want = cluster.together(sql), cluster.alone(sql)
    assert got.schema.names == want.schema.names
    assert got.schema.types == want.schema.types
    assert_same(values(got), values(want), sql)
    assert want.num_rows or kind == "local"


def test_nodes_are_asked_for_tables_alone(cluster: Cluster) -> None:
    """So that they need not know a view of the asker, and none of another version means something else."""
    for sql in ("SELECT _rank, s FROM global.view.all WHERE ts > now() - INTERVAL 1 HOUR", "SELECT * FROM view.worst"):
        for part in cluster.plan(sql).parts:
            named = {table.db for table in parse(part.sql).find_all(type(parse("FROM a.b").args["from_"].this))}
            assert named <= {"comm", "train", "process", "cluster"}
            assert "now()" not in part.sql.lower()
